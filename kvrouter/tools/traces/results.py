"""What came of a replay: an answer for each request, and the figures of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from simulator.fleet.measures import percentile


@dataclass(slots=True)
class Answer:
    """What became of a request. Times in seconds; `arrival` since the replay began, the others since the arrival.

    None: there was no first token, or it is not known how much was cached. `held`: how much of `seconds` the router had
    the request, if that is known. `error` is empty when all went well.
    """

    arrival: float
    prompt_tokens: int
    ttft: float | None = None
    seconds: float = 0.0
    held: float = 0.0
    output_tokens: int = 0
    cached_tokens: int | None = None
    worker: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Figures:
    """A run in figures: times in seconds; `hit_rate` None when no answer reported cached tokens.

    `busiest`: the requests in flight on the busiest worker, on average, as a multiple of the mean of all workers.
    """

    requests: int
    failed: int
    hit_rate: float | None
    computed_tokens: int
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p50: float
    tpot_p90: float
    busiest: float
    seconds: float


@dataclass
class Run:
    """A trace replayed once. `workers`: all there are, also those that got nothing."""

    label: str
    answers: Sequence[Answer]
    workers: Sequence[str]
    notes: list[str] = field(default_factory=list)

    @cached_property
    def ttfts(self) -> list[float]:
        """The times to the first token, the shortest first."""
        return sorted(answer.ttft for answer in self.answers if answer.ttft is not None)

    @cached_property
    def end(self) -> float:
        """When the last answer ended."""
        return max((answer.arrival + answer.seconds for answer in self.answers), default=0.0)

    @cached_property
    def figures(self) -> Figures:
        """The run in figures."""
        reported = [answer for answer in self.answers if answer.cached_tokens is not None]
        prompt = sum(answer.prompt_tokens for answer in reported)
        cached = sum(answer.cached_tokens or 0 for answer in reported)
        tpots = [
            (answer.seconds - answer.ttft) / (answer.output_tokens - 1)
            for answer in self.answers
            if answer.ttft is not None and answer.output_tokens > 1
        ]
        busy = self.busy_seconds()
        mean = sum(busy.values()) / len(busy) if busy else 0.0
        ttft, tpot = self.ttfts or [0.0], tpots or [0.0]
        return Figures(
            requests=len(self.answers),
            failed=sum(bool(answer.error) for answer in self.answers),
            hit_rate=cached / prompt if prompt else None,
            computed_tokens=prompt - cached,
            ttft_p50=percentile(ttft, 0.5),
            ttft_p90=percentile(ttft, 0.9),
            ttft_p99=percentile(ttft, 0.99),
            tpot_p50=percentile(tpot, 0.5),
            tpot_p90=percentile(tpot, 0.9),
            busiest=max(busy.values()) / mean if mean else 1.0,
            seconds=self.end,
        )

    def busy_seconds(self) -> dict[str, float]:
        """The seconds that each worker's requests took, added up."""
        busy = dict.fromkeys(self.workers, 0.0)
        for answer in self.answers:
            if answer.worker:
                busy[answer.worker] = busy.get(answer.worker, 0.0) + answer.seconds - answer.held
        return busy

    def load(self, bins: int, end: float) -> dict[str, list[float]]:
        """The requests in flight on each worker, on average in each of `count` equal times until `end`."""
        width = max(end, 1e-9) / bins
        load = {worker: [0.0] * bins for worker in self.busy_seconds()}
        for answer in self.answers:
            if not answer.worker:
                continue
            row = load[answer.worker]
            start, stop = answer.arrival + answer.held, min(answer.arrival + answer.seconds, end)
            for number in range(int(start / width), min(int(stop / width) + 1, bins)):
                inside = min(stop, (number + 1) * width) - max(start, number * width)
                row[number] += max(inside, 0.0) / width
        return load

    def errors(self) -> list[tuple[str, int]]:
        """What went wrong and how often, the most frequent first."""
        return Counter(answer.error for answer in self.answers if answer.error).most_common(5)

    def as_json(self) -> dict[str, Any]:
        """The figures, and every request."""
        return {
            "label": self.label,
            "figures": asdict(self.figures),
            "busy_seconds": self.busy_seconds(),
            "errors": dict(self.errors()),
            "notes": self.notes,
            "requests": [asdict(answer) for answer in self.answers],
        }
