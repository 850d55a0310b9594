"""What is measured of a side: whole answers, streams, and the processor time of each."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.envoy.sides import Running
from benchmarks.proxy.load import loaded
from benchmarks.proxy.raw_worker import CHUNKS
from benchmarks.proxy.streams import streamed

SIZE = 4096  # bytes of a request
CONNECTIONS = 32


@dataclass(slots=True)
class Measures:
    """Of one side, a value for each round. Seconds, and requests a second."""

    rate: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    whole_cpu: list[float] = field(default_factory=list)
    stream_cpu: list[float] = field(default_factory=list)
    first_event: list[float] = field(default_factory=list)

    @property
    def per_event(self) -> float:
        """Processor seconds of an event beyond an answer's first."""
        return max(median(self.stream_cpu) - median(self.whole_cpu), 0.0) / (CHUNKS - 1)


def measure(side: Running, measures: Measures, seconds: float, streams: int, folder: Path) -> None:
    """One round."""
    loaded(side.url, SIZE, 4, 1.0, folder)  # warm
    measures.alone.append(loaded(side.url, SIZE, 1, seconds, folder).p50)
    before = side.cpu()
    load = loaded(side.url, SIZE, CONNECTIONS, seconds, folder)
    measures.whole_cpu.append((side.cpu() - before) / load.requests)
    measures.rate.append(load.rate)
    before = side.cpu()
    measures.first_event.append(_retried(lambda: streamed(side.url, streams).p50))
    measures.stream_cpu.append((side.cpu() - before) / streams)


def alone(url: str, seconds: float, folder: Path) -> float:
    """What a worker's answer takes without anything between."""
    return loaded(url, SIZE, 1, seconds, folder).p50


def _retried(work: Callable[[], float]) -> float:
    try:
        return work()
    except subprocess.TimeoutExpired:
        return work()


def crossover(envoy: Measures, serve: Measures) -> float | None:
    """How many events an answer must have for Envoy to need less processor time; None: it never does."""
    saved = serve.per_event - envoy.per_event
    more = median(envoy.whole_cpu) - median(serve.whole_cpu)
    return max(1 + more / saved, 1.0) if saved > 0 else None
