"""`kvrouter size`: the smallest simulated fleet that serves a trace within its goals, and its workers of each role.

A fleet serves a trace if a share of the answers meets both goals. The number of workers is doubled until a fleet serves
the trace, and then halved in steps. A fleet of each size is tried with integrated workers, and with a quarter, half and
three quarters of its workers for prefills. The first 30% of the trace do not count, because caches are empty then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from kvrouter.tools.traces.results import percentile
from simulator.fleet.engine import Profile
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS
from simulator.fleet.trace import BLOCK_TOKENS, TracedRequest

_WARM_UP = 0.3
_PREFILL_SHARES = (0.25, 0.5, 0.75)


@dataclass(frozen=True, slots=True)
class Goals:
    """The goals of answers: seconds to the first token and per token after it, and the `share` that meets both."""

    ttft: float
    tpot: float
    share: float


@dataclass(frozen=True, slots=True)
class Sized:
    """A simulated fleet, and how it served a trace. Times are the 90th percentiles in seconds.

    - `met`: the share of answers within both goals.
    """

    fleet: FleetSpec
    met: float
    ttft: float
    tpot: float

    @property
    def in_words(self) -> str:
        """The workers by role."""
        if not self.fleet.prefill:
            return f"{self.fleet.workers} integrated"
        return f"{self.fleet.prefill} prefill, {self.fleet.decode} decode"


class Sizing:
    """The search for the smallest fleet. `show`: called with each simulated fleet."""

    def __init__(
        self,
        requests: Sequence[TracedRequest],
        profile: Profile,
        goals: Goals,
        block_tokens: int = BLOCK_TOKENS,
        show: Callable[[Sized], None] = lambda _: None,
    ) -> None:
        self._requests = requests
        self._profile = profile
        self._goals = goals
        self._block_tokens = block_tokens
        self._show = show
        self._best: dict[int, Sized] = {}

    def smallest(self, most: int) -> Sized | None:
        """Return the smallest fleet of at most `most` workers that serves the trace; None without one."""
        enough = 1
        while not self._serves(min(enough, most)):
            if enough >= most:
                return None
            enough *= 2
        too_few, enough = enough // 2, min(enough, most)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            too_few, enough = (too_few, middle) if self._serves(middle) else (middle, enough)
        return self.best(enough)

    def _serves(self, workers: int) -> bool:
        return self.best(workers).met >= self._goals.share

    def best(self, workers: int) -> Sized:
        """Return the fleet of a number of workers that meets the goals most often. Integrated workers win ties."""
        best = self._best.get(workers)
        if best is None:
            tried = [self._play(workers, prefill) for prefill in _prefill_workers(workers)]
            best = self._best[workers] = max(tried, key=lambda sized: sized.met)
        return best

    def _play(self, workers: int, prefill: int) -> Sized:
        decode = workers - prefill if prefill else 0
        kv_tokens = self._profile.kv_tokens
        fleet = FleetSpec(self._profile, workers, kv_tokens, self._block_tokens, prefill=prefill, decode=decode)
        outcomes = Simulation(fleet, OURS, Random(0)).run(self._requests)
        first = outcomes[0].request.arrival
        steady_from = first + _WARM_UP * (outcomes[-1].request.arrival - first)
        steady = [each for each in outcomes if each.request.arrival >= steady_from]
        ttft = [each.begun - each.request.arrival for each in steady]
        tpot = [_tpot(each) for each in steady]
        good = [a <= self._goals.ttft and b <= self._goals.tpot for a, b in zip(ttft, tpot, strict=True)]
        sized = Sized(fleet, sum(good) / len(good), percentile(ttft, 0.9), percentile(tpot, 0.9))
        self._show(sized)
        return sized


def _prefill_workers(workers: int) -> list[int]:
    """Return the numbers of prefill workers to try; 0: integrated workers."""
    return sorted({0, *(round(workers * share) for share in _PREFILL_SHARES if 0 < round(workers * share) < workers)})


def _tpot(outcome: Outcome) -> float:
    return (outcome.ended - outcome.begun) / max(outcome.request.output_tokens - 1, 1)
