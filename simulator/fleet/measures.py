"""What a run is worth: hit rate, TTFT, TPOT and goodput over its steady part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simulator.fleet.fleet import Outcome

WARM_UP = 0.5  # of the trace: caches fill, and sessions become as many as they will be
TTFT_GOAL = 2.0
TPOT_GOAL = 0.1


@dataclass(frozen=True, slots=True)
class Measures:
    """Times in seconds. `goodput`: answers a second within both goals, of the whole fleet."""

    hit_rate: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_p50: float
    tpot_p90: float
    goodput: float


def measured(outcomes: Sequence[Outcome]) -> Measures:
    """The measures of the requests that arrived after the warm-up."""
    last = outcomes[-1].request.arrival
    steady = [outcome for outcome in outcomes if outcome.request.arrival >= WARM_UP * last]
    ttft = [outcome.begun - outcome.request.arrival for outcome in steady]
    tpot = [(outcome.ended - outcome.begun) / max(outcome.request.output_tokens - 1, 1) for outcome in steady]
    good = sum(first <= TTFT_GOAL and each <= TPOT_GOAL for first, each in zip(ttft, tpot, strict=True))
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


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies."""
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
