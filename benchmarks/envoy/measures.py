"""The measurements of a side: whole answers, streams, and their processor time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.envoy.sides import LONG, SHORT, Running
from benchmarks.proxy.load import loaded
from benchmarks.proxy.streams import streamed

SIZE = 4096  # bytes of a request by default
CONNECTIONS = 32


@dataclass(slots=True)
class Measures:
    """The measurements of one side, a value for each round.

    Times are seconds; `cpu` is that of a stream by its events.
    """

    rate: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    whole_cpu: list[float] = field(default_factory=list)
    first_event: list[float] = field(default_factory=list)
    cpu: dict[int, list[float]] = field(default_factory=lambda: {SHORT: [], LONG: []})

    @property
    def per_event(self) -> float:
        """Return the processor seconds of an event."""
        return max(median(self.cpu[LONG]) - median(self.cpu[SHORT]), 0.0) / (LONG - SHORT)

    @property
    def per_stream(self) -> float:
        """Return the processor seconds of a stream without its events."""
        return median(self.cpu[SHORT]) - SHORT * self.per_event

    def stream(self, events: int) -> float:
        """Return the processor seconds of a stream of `events` events."""
        return self.per_stream + events * self.per_event


def measure_whole(side: Running, measures: Measures, size: int, seconds: float, folder: Path) -> None:
    """Measure whole answers."""
    loaded(side.url, size, 4, 1.0, folder)  # warm-up
    measures.alone.append(loaded(side.url, size, 1, seconds, folder).p50)
    before = side.cpu()
    load = loaded(side.url, size, CONNECTIONS, seconds, folder)
    measures.whole_cpu.append((side.cpu() - before) / load.requests)
    measures.rate.append(load.rate)


def measure_streams(side: Running, measures: Measures, streams: int, events: int) -> None:
    """Measure `streams` concurrent streams of `events` events."""
    streamed(side.url, 8)  # warm-up
    before = side.cpu()
    first = streamed(side.url, streams).p50
    measures.cpu[events].append((side.cpu() - before) / streams)
    if events == LONG:
        measures.first_event.append(first)


def alone(url: str, size: int, seconds: float, folder: Path) -> float:
    """Return the time of a worker's answer without a router."""
    return loaded(url, size, 1, seconds, folder).p50


def crossover(envoy: Measures, serve: Measures) -> float | None:
    """Return the events of a stream from which Envoy needs less processor time; `None` if it never does."""
    saved = serve.per_event - envoy.per_event
    return max((envoy.per_stream - serve.per_stream) / saved, 1.0) if saved > 0 else None
