"""The figures of a run: hit rate, TTFT, TPOT and goodput of its steady part."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvrouter.tools.traces.results import percentile
from router.policies.rates import prefill_seconds
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import Outcome
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest

WARM_UP = 0.5  # the share of the trace in which caches fill, and the number of sessions grows
TTFT_GOAL = 2.0
TPOT_GOAL = 0.1


@dataclass(frozen=True, slots=True)
class Measures:
    """The figures of a run, with times in seconds. `goodput`: the fleet's answers a second within both goals."""

    hit_rate: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p50: float
    tpot_p90: float
    goodput: float


def measured(outcomes: Sequence[Outcome]) -> Measures:
    """Return the figures of the requests that arrived after the warm-up.

    A refused request has an infinite TTFT and no TPOT.
    """
    last = outcomes[-1].request.arrival
    steady = after_warm_up(outcomes)
    ttft = [outcome.begun - outcome.request.arrival for outcome in steady]
    tpot = [_tpot(outcome) for outcome in steady if not outcome.refused]
    good = sum(in_time(outcome, TTFT_GOAL, TPOT_GOAL) for outcome in steady)
    tokens = sum(outcome.request.input_tokens for outcome in steady)
    return Measures(
        sum(outcome.cached for outcome in steady) / tokens,
        percentile(ttft, 0.5),
        percentile(ttft, 0.9),
        percentile(ttft, 0.99),
        percentile(tpot, 0.5),
        percentile(tpot, 0.9),
        good / max(last * (1 - WARM_UP), 1e-9),
    )


def after_warm_up(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the requests that arrived after the warm-up."""
    last = outcomes[-1].request.arrival
    return [outcome for outcome in outcomes if outcome.request.arrival >= WARM_UP * last]


def in_time(outcome: Outcome, ttft: float | None, tpot: float | None) -> bool:
    """Return whether an answer arrived within these times in seconds. None: any time. A refused request did not."""
    if outcome.refused:
        return False
    first = outcome.begun - outcome.request.arrival
    return (ttft is None or first <= ttft) and (tpot is None or _tpot(outcome) <= tpot)


def _tpot(outcome: Outcome) -> float:
    return (outcome.ended - outcome.begun) / max(outcome.request.output_tokens - 1, 1)


def idle_ttfts(requests: Iterable[TracedRequest]) -> Iterator[float]:
    """Yield the TTFT of each request on an idle fleet that evicts nothing, the bound of all routers.

    `requests`: in the order of their arrival.
    """
    seen: set[int] = set()
    for request in requests:
        reusable = request.blocks[: (request.input_tokens - 1) // BLOCK_TOKENS]
        cached = BLOCK_TOKENS * sum(1 for _ in takewhile(seen.__contains__, reusable))
        seen.update(request.blocks, request.finished)
        yield prefill_seconds(LLAMA_70B.rates, request.input_tokens, cached, 0, 0)
