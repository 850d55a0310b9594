"""llm-d's predicted-latency scheduling as a policy, by the README of its `latency-scorer`: the choice by headroom.

    headroom = SLO - predicted latency, of TTFT and of TPOT; 0.8 and 0.2 of the score, after both are scaled to 0..1

- Candidates that hold nearly the whole prompt come first, unless their TTFT is 5 s longer.
- Among candidates with headroom in both, the one with the least (or the most) wins.
- Without such candidates, idle ones come first, then those that miss only TPOT, then those that miss only TTFT. Of
  these, the one that misses by the least wins.
- One in a hundred choices explores.
- Without an SLO, headroom counts from 0.

llm-d predicts by a model that is trained beside it. Here it uses this project's predictions.

https://github.com/llm-d/llm-d-router, pkg/epp/framework/plugins/scheduling/scorer/latency
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from router.load.target_load import LoadTable
from router.policies import Candidate, Decision, NamedPolicy, Request
from router.policies.records import one_of_tied
from router.policies.registry import PolicySpec
from router.prediction.learned import Learned
from router.prediction.slo import Prediction
from router.settings import PolicyName
from simulator.fleet.simulated_router import Side
from simulator.fleet.trace import RequestSLO

_GLOBAL_AFFINITY, _AFFINITY = 0.99, 0.80
_MOST_PENALTY = 5.0  # seconds of TTFT
_EXPLORES = 0.01
_TTFT_WEIGHT, _TPOT_WEIGHT = 0.8, 0.2


@dataclass(frozen=True, slots=True)
class HeadroomSide(Side):
    """A router with this policy. A missed SLO costs nothing in it beyond the policy's own rule.

    - `most`: whether the most headroom wins, and not the least.
    - `slos_of`: the SLOs of sessions, because a policy does not see a request's SLO.
    """

    most: bool = False
    slos_of: Mapping[str, RequestSLO | None] = field(default_factory=dict)

    def make_policy(self, random: Random, learned: Learned, load: LoadTable) -> NamedPolicy:
        """Return the policy for one run."""

        def choose(candidates: list[Candidate], request: Request) -> Decision:
            slo = self.slos_of.get(request.session or "")
            predictions = [_prediction(each, request, learned, load) for each in candidates]
            chosen = most_suitable(candidates, predictions, slo, request.tokens, random, self.most)
            return Decision(chosen, candidates, lambda each: {"not chosen": float(each is not chosen)})

        return NamedPolicy(PolicySpec(lambda *_: choose, "llm-d, llm-d/llm-d-router"), choose)


def headroom_side(name: str, most: bool, slos_of: Mapping[str, RequestSLO | None]) -> HeadroomSide:
    """Return a router with this policy. The parameters are those of `HeadroomSide`."""
    return HeadroomSide(name, PolicyName.KV_AWARE, slos=True, slo_miss_cost=0.0, most=most, slos_of=slos_of)


def _prediction(candidate: Candidate, request: Request, learned: Learned, load: LoadTable) -> Prediction:
    target = candidate.target
    backlog = load.of(target.worker, target.dp_rank).backlog
    return learned.predictions.of(candidate, request.tokens, request.output_tokens, backlog)


@dataclass(frozen=True, slots=True)
class _Scored:
    candidate: Candidate
    prefix: float
    ttft: float
    headroom: tuple[float, float]

    @property
    def positive(self) -> bool:
        return min(self.headroom) >= 0


def most_suitable(
    candidates: Sequence[Candidate],
    predictions: Sequence[Prediction],
    slo: RequestSLO | None,
    tokens: int,
    random: Random,
    most: bool = False,
) -> Candidate:
    """Return the candidate for a request that has just arrived.

    - `predictions`: the predicted latencies of the candidates, in their order.
    - `slo`: the request's SLO, if it has one.
    - `tokens`: the length of its prompt.
    - `random`: breaks ties and explores.
    - `most`: whether the most headroom wins, and not the least.
    """
    scored = [
        _Scored(each, each.overlap / tokens, prediction.ttft.expected, _headroom(prediction, slo))
        for each, prediction in zip(candidates, predictions, strict=True)
    ]
    scored = _sticky(scored, _GLOBAL_AFFINITY, random)
    positive = [each for each in scored if each.positive]
    negative = [each for each in scored if not each.positive]
    explores = random.random() < _EXPLORES
    if positive and not (negative and explores):
        tier = _sticky(positive, _AFFINITY, random)
        score = _score(tier)
        return _best(tier, score if most else lambda each: -score(each), random)
    tier = _sticky(negative, _AFFINITY, random)
    idle = [each for each in tier if not each.candidate.requests]
    misses_tpot = [each for each in tier if each.headroom[0] >= 0]
    misses_ttft = [each for each in tier if each.headroom[1] >= 0]
    tier = idle or misses_tpot or misses_ttft or tier
    return _best(tier, _score(tier), random)


def _headroom(prediction: Prediction, slo: RequestSLO | None) -> tuple[float, float]:
    """Return the headroom of TTFT and of TPOT. If an SLO sets only one of them, the other has none to lose."""
    ttft, tpot = prediction.ttft.expected, prediction.tpot.expected
    if slo is None:
        return -ttft, -tpot
    return (0.0 if slo.ttft is None else slo.ttft - ttft), (0.0 if slo.tpot is None else slo.tpot - tpot)


def _sticky(scored: list[_Scored], affinity: float, random: Random) -> list[_Scored]:
    """Return the candidates that hold at least `affinity` of the prompt; all if none does, or if they are slow."""
    sticky = [each for each in scored if each.prefix >= affinity]
    others = [each for each in scored if each.prefix < affinity]
    if not sticky or not others or random.random() < _EXPLORES:
        return scored
    slower = min(each.ttft for each in sticky) - min(each.ttft for each in others)
    return scored if slower > _MOST_PENALTY else sticky


def _score(tier: list[_Scored]) -> Callable[[_Scored], float]:
    spans = []
    for place in (0, 1):
        values = [each.headroom[place] for each in tier]
        spans.append((min(values), max(values) - min(values)))
    (ttft_least, ttft_span), (tpot_least, tpot_span) = spans
    ttft_weight, tpot_weight = _TTFT_WEIGHT, _TPOT_WEIGHT
    if not ttft_span or not tpot_span:
        ttft_weight = tpot_weight = 1.0

    def score(each: _Scored) -> float:
        ttft = (each.headroom[0] - ttft_least) / ttft_span if ttft_span else 0.0
        tpot = (each.headroom[1] - tpot_least) / tpot_span if tpot_span else 0.0
        return ttft_weight * ttft + tpot_weight * tpot

    return score


def _best(tier: list[_Scored], score: Callable[[_Scored], float], random: Random) -> Candidate:
    scores = [score(each) for each in tier]
    highest = max(scores)
    return one_of_tied(
        [each.candidate for each, value in zip(tier, scores, strict=True) if value >= highest - 1e-12], random
    )
