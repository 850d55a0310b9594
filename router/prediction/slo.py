"""What a request was promised, what is predicted for it, and which candidate it better goes to.

    late = max(TTFT - time left, 0) + output · max(TPOT - promised, 0)      in seconds, of an answer of `output` tokens
    J'   = J + ω · turns · (chance that its promise is broken there + promises of others that it breaks there)

J is the policy's cost, and ω what a broken promise costs: `policy.broken_promise`. `turns` is how many a session has
in the mean (`router.prediction.session_turns`): the next ones go where its prefix is, and meet the same company. The
lowest J' wins. So among candidates that keep the promise the cheapest one wins, and a promise that is kept nowhere
scatters no prefixes in vain. A session leaves its place where that is worth computing its prefix once more.

A request that is refused rather than served late goes to a candidate that keeps its promise wherever there is one. For
one that was promised nothing the promises of others count less, and for this turn alone: it is not to pay for them with
its own time. Nor do all that were promised something loose go where those without a promise are: each of these counts
half of one that was promised the time per token that it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import erf, log, sqrt
from typing import Final

from router.policies.rates import Rates, prefill_seconds
from router.policies.records import Candidate, CostUnit, Decision
from router.prediction.ratios import Ratios

# What promises of others count for a request without one, and what an answer without one counts for others.
_FOR_UNPROMISED: Final = 0.3
_OF_UNPROMISED: Final = 0.5
# A loss that no other candidate is looked for because of.
LITTLE: Final = 0.05
# How far an answer's time per token comes to be from what is expected now, as a standard deviation of logarithms: it
# depends on all that comes until its end.
_DEVIATION: Final = 0.5
# The price of a token where costs are counted in seconds.
_SECONDS_PER_TOKEN: Final = 4e-5
# A worker computes prompts all the time, nearly: its decoding is slower by no more than this.
_MOST_SHARE: Final = 0.95


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


# What a request has that was promised nothing.
NO_SLO: Final = SLO(None, None, 0.0)


@dataclass(frozen=True, slots=True)
class Band:
    """A predicted time in seconds as its 10th, 50th and 90th percentile."""

    low: float
    expected: float
    high: float


class Estimate:
    """One time as the rates have it, and how far such estimates were off; None: not known yet."""

    __slots__ = ("by_rates", "ratios")

    def __init__(self, by_rates: float, ratios: Ratios | None) -> None:
        self.by_rates = by_rates
        self.ratios = ratios

    @property
    def expected(self) -> float:
        """The middle of what comes."""
        return self.by_rates if self.ratios is None else self.by_rates * self.ratios.at(0.5)

    @property
    def band(self) -> Band:
        """What nearly all of what comes is between."""
        by_rates, ratios = self.by_rates, self.ratios
        if ratios is None:
            return Band(by_rates, by_rates, by_rates)
        return Band(by_rates * ratios.at(0.1), by_rates * ratios.at(0.5), by_rates * ratios.at(0.9))

    def chance(self, seconds: float) -> float:
        """The chance that it takes so long at most."""
        if self.ratios is None:
            return float(self.by_rates <= seconds)
        return self.ratios.at_most(seconds / self.by_rates)


class Prediction:
    """What a candidate is predicted to take for a request: to its first token from now on, and for each one after it.

    `others_broken`: how many promises to others it is expected to break there.
    """

    __slots__ = ("others_broken", "tpot", "ttft")

    def __init__(self, ttft: Estimate, tpot: Estimate, others_broken: float = 0.0) -> None:
        self.ttft = ttft
        self.tpot = tpot
        self.others_broken = others_broken

    @property
    def measured(self) -> bool:
        """Whether it is known how far it may be off."""
        return self.ttft.ratios is not None and self.tpot.ratios is not None

    def slo_missed_by(self, slo: SLO, now: float, output_tokens: float) -> float:
        """Seconds by which a promise is expected to be missed; 0 where it is kept."""
        late = 0.0
        if slo.first_token_by is not None:
            late = max(self.ttft.expected - (slo.first_token_by - now), 0.0)
        if slo.tpot is not None:
            late += output_tokens * max(self.tpot.expected - slo.tpot, 0.0)
        return late

    def chance(self, slo: SLO, now: float) -> float:
        """The chance that a promise is kept."""
        chance = 1.0
        if slo.first_token_by is not None:
            chance = self.ttft.chance(slo.first_token_by - now)
        if slo.tpot is not None:
            chance *= self.tpot.chance(slo.tpot)
        return chance

    def loss(self, slo: SLO, now: float) -> float:
        """How many promises are expected to be broken, its own and those of others."""
        return 1.0 - self.chance(slo, now) + self.others_broken


def ttft_by_rates(candidate: Candidate, rates: Rates, tokens: int, backlog: float, transfer_tokens: float) -> float:
    """Seconds to the first token of a prompt on a candidate whose earlier prefills take `backlog` more seconds.

    `transfer_tokens`: what loading cached tokens takes, as tokens computed.
    """
    decoding = max(candidate.requests - candidate.waiting, 0)
    prefill = prefill_seconds(rates, tokens, candidate.overlap, decoding, candidate.context)
    return backlog + prefill + rates.token * transfer_tokens


def step_by_rates(candidate: Candidate, rates: Rates, tokens: int, output_tokens: float) -> float:
    """Seconds for each token of an answer beside what a candidate has in flight, while it computes no prompt."""
    context = candidate.context + tokens + output_tokens / 2
    return rates.step + rates.token * (candidate.requests + 1) + rates.context_token * context


def tpot_by_rates(step: float, prefill_share: float) -> float:
    """The same while it computes prompts for this share of the time."""
    return step / (1 - min(prefill_share, _MOST_SHARE))


def broken_by(promised: Mapping[float, int], unpromised: int, before: float, after: float) -> float:
    """How many promises a prefill is expected to break, when it changes the expected time per token.

    `promised`: how many answers in flight were promised which time per token; `unpromised`: how many were not. What
    seems broken already may be kept in the end, so it counts, too, if less. Were it to count for nothing, every prompt
    would go to the worker where most is lost, and its session with it.
    """
    broken = sum(count * (_kept(tpot, before) - _kept(tpot, after)) for tpot, count in promised.items())
    return broken + _OF_UNPROMISED * unpromised * (0.5 - _kept(before, after))


def _kept(promised: float, expected: float) -> float:
    """The chance that a time per token is kept in the end."""
    return (1 + erf(log(promised / expected) / (_DEVIATION * sqrt(2)))) / 2


def counts_in_prefill(unit: CostUnit) -> bool:
    """Whether a policy's costs are such that broken promises can be counted in them."""
    return _worth(unit, 1.0) is not None


def choose_for_slo(
    decision: Decision,
    predictions: list[Prediction],
    slo: SLO,
    now: float,
    broken_promise: float,
    turns: float = 1.0,
) -> int:
    """The place of the candidate that a promised request better goes to: see above.

    `decision`: the policy's own, without the promise; `forecasts`: of its candidates, in their order.
    `broken_promise`: ω, in prefill tokens.
    """
    candidates = decision.candidates
    places = list(range(len(candidates)))
    if slo.refuses_late:
        places_in_time = [place for place in places if predictions[place].slo_missed_by(slo, now, 1.0) <= 0]
        places = places_in_time or places
    worth = _worth(decision.unit, broken_promise * (_FOR_UNPROMISED if slo is NO_SLO else turns))
    losses = [prediction.loss(slo, now) for prediction in predictions]
    totals = [sum(decision.terms(candidate).values()) for candidate in candidates]
    if worth is None:  # the policy's costs are in nothing that promises could be counted in
        return min(places, key=lambda place: (losses[place], totals[place]))
    return min(places, key=lambda place: totals[place] + worth * losses[place])


def _worth(unit: CostUnit, tokens: float) -> float | None:
    if unit is CostUnit.TOKENS:
        return tokens
    return tokens * _SECONDS_PER_TOKEN if unit is CostUnit.SECONDS else None
