"""SLOs: the predicted latency of candidates, and the candidate that receives a request with an SLO.

    missed by = max(TTFT - time left, 0) + output · max(TPOT - objective, 0)      in seconds, of `output` tokens
    J'        = J + ω · turns · (chance that its SLO is missed there + SLOs of others that it makes miss there)

J is the policy's cost, and ω the cost of a missed SLO: `MISSED_SLO_COST`. The lowest J' wins. So the cheapest
candidate wins among those that meet the SLO, and an SLO that no candidate can meet scatters no prefixes.

`turns` is the mean number of turns of a session. Its next requests are sent to the worker with its prefix. So a session
leaves its prefix only if that is worth computing the prefix once more.

A request that is refused rather than served late is sent to a candidate that meets its SLO, if there is one. For a
request without an SLO, the SLOs of others count less, and for this turn alone. An answer without an SLO counts as half
an answer whose TPOT objective is its present TPOT. Otherwise requests with loose SLOs would displace those without one.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import erf, log, sqrt
from typing import Final

from router.policies.rates import Rates, prefill_seconds
from router.policies.records import Candidate, CostUnit, Decision

KEPT: Final = 128
# The cost of an SLO that is expected to be missed, in prefill tokens.
MISSED_SLO_COST: Final = 40_000.0
# The weight of others' SLOs for a request without an SLO, and the weight of an answer without an SLO for others.
_FOR_NO_SLO: Final = 0.3
_OF_NO_SLO: Final = 0.5
# Up to this loss the policy's choice is kept, and no other candidate is predicted.
LITTLE: Final = 0.05
# Standard deviation of the logarithm of an answer's final TPOT, given its present TPOT.
_DEVIATION: Final = 0.5
# Seconds per prefill token, for policies whose costs are seconds.
_SECONDS_PER_TOKEN: Final = 4e-5
# The highest share of prefills in a worker's time that slows its decoding.
_MOST_SHARE: Final = 0.95


class Ratios:
    """The last `KEPT` ratios of measured to predicted times, sorted as well as in order of arrival."""

    __slots__ = ("_latest", "_ordered")

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, ratio: float) -> None:
        """Add a ratio, and drop the oldest if there are more than `KEPT`."""
        if len(self._latest) >= KEPT:
            oldest = self._latest.popleft()
            del self._ordered[bisect_right(self._ordered, oldest) - 1]
        self._latest.append(ratio)
        insort(self._ordered, ratio)

    def at(self, share: float) -> float:
        """Return the quantile of the ratios at `share`, from 0 to 1. At least one ratio is needed."""
        return self._ordered[int(share * (len(self._ordered) - 1) + 0.5)]

    def at_most(self, ratio: float) -> float:
        """Return the share of the ratios that are at most `ratio`. At least one ratio is needed."""
        return bisect_right(self._ordered, ratio) / len(self._ordered)


@dataclass(frozen=True, slots=True)
class SLO:
    """A request's service-level objective: when its tokens are due. Times are in seconds.

    - `ttft`: the time from the request's arrival to its first token; None: any time.
    - `tpot`: the time for each token after the first; None: any time.
    - `arrived`: when the request arrived, by the router's clock.
    - `service_level`: the class that the objective comes from; "" if the request's headers set it alone.
    - `refuses_late`: whether the request is refused if no candidate can meet the objective. If not, it is served late.
    """

    ttft: float | None
    tpot: float | None
    arrived: float
    service_level: str = ""
    refuses_late: bool = False

    @property
    def first_token_by(self) -> float | None:
        """The time at which the first token is due, by the router's clock; None: at any time."""
        return None if self.ttft is None else self.arrived + self.ttft

    @property
    def in_words(self) -> str:
        """The objective in a sentence for people."""
        ttft = [] if self.ttft is None else [f"a first token within {self.ttft:g} s"]
        tpot = [] if self.tpot is None else [f"{1000 * self.tpot:g} ms for each after it"]
        return " and ".join(ttft + tpot)


# The objective of a request without an SLO.
NO_SLO: Final = SLO(None, None, 0.0)


@dataclass(frozen=True, slots=True)
class Band:
    """A predicted time in seconds as its 10th, 50th and 90th percentile."""

    low: float
    expected: float
    high: float


class Estimate:
    """A predicted time.

    - `by_rates`: the time by the learned rates, in seconds.
    - `ratios`: the last ratios of measured times to it; None if there are too few.
    """

    __slots__ = ("by_rates", "ratios")

    def __init__(self, by_rates: float, ratios: Ratios | None) -> None:
        self.by_rates = by_rates
        self.ratios = ratios

    @property
    def expected(self) -> float:
        """The median in seconds."""
        return self.by_rates if self.ratios is None else self.by_rates * self.ratios.at(0.5)

    @property
    def band(self) -> Band:
        """The 10th, 50th and 90th percentile."""
        by_rates, ratios = self.by_rates, self.ratios
        if ratios is None:
            return Band(by_rates, by_rates, by_rates)
        return Band(by_rates * ratios.at(0.1), by_rates * ratios.at(0.5), by_rates * ratios.at(0.9))

    def chance(self, seconds: float) -> float:
        """Return the probability that the time is at most `seconds`."""
        if self.ratios is None:
            return float(self.by_rates <= seconds)
        return self.ratios.at_most(seconds / self.by_rates)


class Prediction:
    """The predicted latency of a request on a candidate.

    - `ttft`: the time to the first token, from now on.
    - `tpot`: the time per token after it.
    - `others_missed`: the expected number of other requests whose SLO it makes miss there.
    """

    __slots__ = ("others_missed", "tpot", "ttft")

    def __init__(self, ttft: Estimate, tpot: Estimate, others_missed: float = 0.0) -> None:
        self.ttft = ttft
        self.tpot = tpot
        self.others_missed = others_missed

    @property
    def measured(self) -> bool:
        """True if the errors of both predictions are known."""
        return self.ttft.ratios is not None and self.tpot.ratios is not None

    def slo_missed_by(self, slo: SLO, now: float, output_tokens: float) -> float:
        """Return the seconds by which an SLO is expected to be missed; 0 if it is met."""
        late = 0.0
        if slo.first_token_by is not None:
            late = max(self.ttft.expected - (slo.first_token_by - now), 0.0)
        if slo.tpot is not None:
            late += output_tokens * max(self.tpot.expected - slo.tpot, 0.0)
        return late

    def chance(self, slo: SLO, now: float) -> float:
        """Return the probability that an SLO is met."""
        chance = 1.0
        if slo.first_token_by is not None:
            chance = self.ttft.chance(slo.first_token_by - now)
        if slo.tpot is not None:
            chance *= self.tpot.chance(slo.tpot)
        return chance

    def loss(self, slo: SLO, now: float) -> float:
        """Return the expected number of missed SLOs, its own and those of others."""
        return 1.0 - self.chance(slo, now) + self.others_missed


def ttft_by_rates(candidate: Candidate, rates: Rates, tokens: int, backlog: float, transfer_tokens: float) -> float:
    """Return the seconds to the first token of a prompt on a candidate."""
    decoding = max(candidate.requests - candidate.waiting, 0)
    prefill = prefill_seconds(rates, tokens, candidate.reused, decoding, candidate.context)
    load = 0.0 if candidate.source is None else candidate.source.load_seconds
    return backlog + load + prefill + rates.token * transfer_tokens


def step_by_rates(candidate: Candidate, rates: Rates, tokens: int, output_tokens: float) -> float:
    """Return the seconds per token of an answer on a candidate that computes no prompt meanwhile."""
    context = candidate.context + tokens + output_tokens / 2
    return rates.step_seconds(candidate.requests + 1, context)


def tpot_by_rates(step: float, prefill_share: float) -> float:
    """Return the seconds per token of a worker that prefills for a share of its time. `step`: without prefills."""
    return step / (1 - min(prefill_share, _MOST_SHARE))


def expected_misses(objectives: Mapping[float, int], without_objective: int, before: float, after: float) -> float:
    """Return the expected number of SLOs that a prefill makes miss, when it changes the TPOT of a target.

    An SLO that seems missed may still be met, so it counts as well, but less. If it did not count, every prompt would
    go to the worker with the most missed SLOs.

    - `objectives`: the number of answers in flight by their TPOT objective.
    - `without_objective`: the number of answers in flight without one.
    """
    misses = sum(count * (_kept(tpot, before) - _kept(tpot, after)) for tpot, count in objectives.items())
    return misses + _OF_NO_SLO * without_objective * (0.5 - _kept(before, after))


def _kept(objective: float, expected: float) -> float:
    """Return the probability that a TPOT objective is met in the end."""
    return (1 + erf(log(objective / expected) / (_DEVIATION * sqrt(2)))) / 2


def counts_in_prefill(unit: CostUnit) -> bool:
    """Return whether an SLO penalty can be added in a policy's cost unit."""
    return _worth(unit, 1.0) is not None


def miss_cost(unit: CostUnit, slo: SLO, slo_miss_cost: float, turns: float) -> float | None:
    """Return the cost of a missed SLO for all `turns` of a session; None if the unit allows no SLO penalty."""
    return _worth(unit, slo_miss_cost * (_FOR_NO_SLO if slo is NO_SLO else turns))


def choose_for_slo(
    decision: Decision,
    predictions: list[Prediction],
    slo: SLO,
    now: float,
    slo_miss_cost: float,
    turns: float = 1.0,
) -> int:
    """Return the position of the candidate with the lowest J', as the module describes it.

    - `turns`: the mean turns of a session.
    """
    candidates = decision.candidates
    positions = list(range(len(candidates)))
    if slo.refuses_late:
        in_time = [position for position in positions if predictions[position].slo_missed_by(slo, now, 1.0) <= 0]
        positions = in_time or positions
    worth = miss_cost(decision.unit, slo, slo_miss_cost, turns)
    losses = [prediction.loss(slo, now) for prediction in predictions]
    totals = [sum(decision.terms(candidate).values()) for candidate in candidates]
    if worth is None:  # no SLO penalty can be added in the policy's unit
        return min(positions, key=lambda position: (losses[position], totals[position]))
    return min(positions, key=lambda position: totals[position] + worth * losses[position])


def _worth(unit: CostUnit, tokens: float) -> float | None:
    if unit is CostUnit.TOKENS:
        return tokens
    return tokens * _SECONDS_PER_TOKEN if unit is CostUnit.SECONDS else None
