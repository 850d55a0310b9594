"""What is measured of a side: whole answers, streams, and the processor time of each."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.envoy.sides import LONG, SHORT, Running
from benchmarks.proxy.load import loaded
from benchmarks.proxy.streams import streamed

SIZE = 4096  # bytes of a request, unless another is asked for
CONNECTIONS = 32


@dataclass(slots=True)
class Measures:
    """Of one side, a value for each round. Seconds, and requests a second; `cpu`: of a stream, by its events."""

    rate: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    whole_cpu: list[float] = field(default_factory=list)
    first_event: list[float] = field(default_factory=list)
    cpu: dict[int, list[float]] = field(default_factory=lambda: {SHORT: [], LONG: []})

    @property
    def per_event(self) -> float:
        """Processor seconds of an event."""
        return max(median(self.cpu[LONG]) - median(self.cpu[SHORT]), 0.0) / (LONG - SHORT)

    @property
    def per_stream(self) -> float:
        """Those of a stream beside its events."""
        return median(self.cpu[SHORT]) - SHORT * self.per_event

    def stream(self, events: int) -> float:
        """Those of a whole stream of so many events."""
        return self.per_stream + events * self.per_event


def measure_whole(side: Running, measures: Measures, size: int, seconds: float, folder: Path) -> None:
    """Whole answers."""
    loaded(side.url, size, 4, 1.0, folder)  # warm
    measures.alone.append(loaded(side.url, size, 1, seconds, folder).p50)
    before = side.cpu()
    load = loaded(side.url, size, CONNECTIONS, seconds, folder)
    measures.whole_cpu.append((side.cpu() - before) / load.requests)
    measures.rate.append(load.rate)


def measure_streams(side: Running, measures: Measures, streams: int, events: int) -> None:
    """So many streams at once, of so many events each."""
    streamed(side.url, 8)  # warm
    before = side.cpu()
    first = streamed(side.url, streams).p50
    measures.cpu[events].append((side.cpu() - before) / streams)
    if events == LONG:
        measures.first_event.append(first)


def alone(url: str, size: int, seconds: float, folder: Path) -> float:
    """What a worker's answer takes without anything between."""
    return loaded(url, size, 1, seconds, folder).p50


def crossover(envoy: Measures, serve: Measures) -> float | None:
    """How many events a stream must have for Envoy to need less processor time; None: it never does."""
    saved = serve.per_event - envoy.per_event
    return max((envoy.per_stream - serve.per_stream) / saved, 1.0) if saved > 0 else None
