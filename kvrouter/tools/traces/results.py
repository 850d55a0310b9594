"""The results of a replay: an answer for each request, the figures of a run, and those of the trace itself."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from simulator.fleet.trace import TracedRequest, TraceLine


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


@dataclass(slots=True)
class Answer:
    """The result of a request. Times are seconds: `arrival` since the start of the replay, others since the arrival.

    - `ttft`: `None` without a first token.
    - `cached_tokens`: `None` if not reported.
    - `held`: the part of `seconds` in the router's queue, if known.
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
    """The figures of a run; times in seconds.

    - `hit_rate`: `None` if no answer reported cached tokens.
    - `busiest`: mean requests in flight on the busiest worker, as a multiple of the mean of all workers.
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
    """One replay of a trace. `workers` are all workers, also idle ones."""

    label: str
    answers: Sequence[Answer]
    workers: Sequence[str]
    notes: list[str] = field(default_factory=list)

    @cached_property
    def ttfts(self) -> list[float]:
        """The times to the first token, in ascending order."""
        return sorted(answer.ttft for answer in self.answers if answer.ttft is not None)

    @cached_property
    def end(self) -> float:
        """The end of the last answer."""
        return max((answer.arrival + answer.seconds for answer in self.answers), default=0.0)

    @cached_property
    def figures(self) -> Figures:
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
        """Return the total seconds of each worker's requests."""
        busy = dict.fromkeys(self.workers, 0.0)
        for answer in self.answers:
            if answer.worker:
                busy[answer.worker] = busy.get(answer.worker, 0.0) + answer.seconds - answer.held
        return busy

    def load(self, bins: int, end: float) -> dict[str, list[float]]:
        """Return the mean requests in flight on each worker, in each of `bins` equal periods until `end`."""
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
        """Return the most frequent errors and their counts."""
        return Counter(answer.error for answer in self.answers if answer.error).most_common(5)

    def as_json(self) -> dict[str, Any]:
        """Return the figures and every request."""
        return {
            "label": self.label,
            "figures": asdict(self.figures),
            "busy_seconds": self.busy_seconds(),
            "errors": dict(self.errors()),
            "notes": self.notes,
            "requests": [asdict(answer) for answer in self.answers],
        }


_SIZES = 8  # number of cache sizes, each twice the previous one


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace in figures. Lengths are tokens, times are seconds.

    - `best_hit_rate`: the hit rate of one unlimited cache.
    - `by_cache`: hit rates of LRU caches by size; empty if no prompt fills a block.
    """

    requests: int
    seconds: float
    sessions: int
    prompt_tokens: int
    output_tokens: int
    prompt_p50: float
    prompt_p90: float
    output_p50: float
    output_p90: float
    working_set: int
    best_hit_rate: float
    by_cache: list[tuple[int, float]]
    recorded_hit_rate: float | None
    recorded_ttft_p50: float | None
    recorded_ttft_p90: float | None


def shape(lines: Sequence[TraceLine], requests: Sequence[TracedRequest], block_tokens: int) -> Workload:
    """Return the workload of at least one request; `requests` are those of `lines`."""
    prompts = [request.input_tokens for request in requests]
    outputs = [request.output_tokens for request in requests]
    blocks = len({block for request in requests for block in request.finished})
    reported = [line for line in lines if line.cached_tokens is not None]
    ttfts = [line.ttft_ms / 1000 for line in lines if line.ttft_ms is not None]
    sizes = sorted({blocks >> halvings for halvings in range(1, _SIZES + 1)} - {0, blocks})
    best = _hit_rate(requests, block_tokens, blocks)
    return Workload(
        len(requests),
        requests[-1].arrival - requests[0].arrival,
        len({request.session for request in requests}),
        sum(prompts),
        sum(outputs),
        percentile(prompts, 0.5),
        percentile(prompts, 0.9),
        percentile(outputs, 0.5),
        percentile(outputs, 0.9),
        blocks * block_tokens,
        best,
        [(size * block_tokens, _hit_rate(requests, block_tokens, size)) for size in sizes]
        + ([(blocks * block_tokens, best)] if blocks else []),
        sum(line.cached_tokens or 0 for line in reported) / (sum(line.input_length for line in reported) or 1)
        if reported
        else None,
        percentile(ttfts, 0.5) if ttfts else None,
        percentile(ttfts, 0.9) if ttfts else None,
    )


def _hit_rate(requests: Sequence[TracedRequest], block_tokens: int, capacity: int) -> float:
    """Return the share of prompt tokens that one LRU cache of `capacity` blocks finds."""
    cache: OrderedDict[int, None] = OrderedDict()
    found = total = 0
    for request in requests:
        matched = 0
        for block in request.blocks[: (request.input_tokens - 1) // block_tokens]:
            if block not in cache:
                break
            matched += 1
        found += matched * block_tokens
        total += request.input_tokens
        for block in reversed(request.finished):  # the end of a prompt is evicted first
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > capacity:
            cache.popitem(last=False)
    return found / total


def histogram(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """Count the values in each range between two edges. The last range includes its end."""
    ordered = sorted(values)
    counts, place = [], 0
    for _, above in pairwise(edges):
        begun = place
        while place < len(ordered) and (ordered[place] < above or above == edges[-1]):
            place += 1
        counts.append(place - begun)
    return counts
