"""The figures of an overloaded run: goodput, TTFT by priority, preemptions, refusals and how true `Retry-After` was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Final

from benchmarks.policy.measures import in_time
from kvrouter.tools.traces.results import percentile
from simulator.fleet.fleet import Outcome, Simulation

TPOT_GOAL: Final = 0.05
WARM_UP: Final = 0.3


@dataclass(frozen=True, slots=True)
class OverloadRun:
    """The figures of a run after its warm-up.

    - `goodput`: the answers a second with at most 50 ms a token.
    - `answered`: all answers a second. `arrived`: the requests a second.
    - `ttft`: p50 and p99 in seconds by priority, of answered requests.
    - `refused`: the share of refused requests by priority.
    - `true`: the share of requests that were answered when they were sent again after `Retry-After`.
    """

    goodput: float
    answered: float
    arrived: float
    ttft: dict[int, tuple[float, float]]
    refused: dict[int, float]
    preemptions: int
    recomputed: int
    engine_refusals: int
    true: float


def measured(simulation: Simulation, outcomes: Sequence[Outcome], seconds: float) -> OverloadRun:
    """Return the figures of the requests of a run. Answers count if they end within `seconds`."""
    first = WARM_UP * seconds
    steady = [each for each in outcomes if each.request.arrival >= first]
    length = seconds - first
    ended = [each for each in outcomes if first <= each.ended < seconds]
    ttft: dict[int, tuple[float, float]] = {}
    refused: dict[int, float] = {}
    for priority in sorted({each.request.priority for each in steady}):
        of_priority = [each for each in steady if each.request.priority == priority]
        times = [each.begun - each.request.arrival for each in of_priority if not each.refused]
        ttft[priority] = (percentile(times, 0.5), percentile(times, 0.99)) if times else (inf, inf)
        refused[priority] = sum(each.refused for each in of_priority) / len(of_priority)
    return OverloadRun(
        sum(in_time(each, None, TPOT_GOAL) for each in ended) / length,
        len(ended) / length,
        len(steady) / length,
        ttft,
        refused,
        sum(engine.preemptions for engine in simulation.engines),
        sum(engine.recomputed for engine in simulation.engines),
        sum(each.engine_refusals for each in outcomes),
        _true(outcomes),
    )


def _true(outcomes: Sequence[Outcome]) -> float:
    """Return the share of requests that were answered when they were sent again after `Retry-After`."""
    again = [not each.refused for each in outcomes if each.sent_again]
    return sum(again) / len(again) if again else nan
