"""The workload of a trace: arrivals, lengths, and the best possible hit rates."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvrouter.tools.traces.results import percentile
from simulator.fleet.trace import TracedRequest, TraceLine

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
