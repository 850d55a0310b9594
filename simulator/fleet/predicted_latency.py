"""llm-d's predicted-latency scheduling, as the README of its `latency-scorer` has it: the choice by headroom.

    headroom = promised - predicted, of TTFT and of TPOT, 0.8 and 0.2 of the score after both are scaled to 0..1

Candidates that hold nearly the whole prompt go before others, unless their TTFT is 5 s longer. Among those with
headroom in both the one with the least (or the most) wins; where none has, idle ones, then those that miss TPOT alone,
then those that miss TTFT alone, and of these the one that misses it by the least. One in a hundred choices explores.
Without a promise headroom is counted from 0. Its predictions come from a model trained beside; here they are this
project's.

https://github.com/llm-d/llm-d-router, pkg/epp/framework/plugins/scheduling/scorer/latency
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from router.policies import Candidate
from router.policies.records import one_of_tied
from router.prediction.slo import SLO, Prediction

_GLOBAL_AFFINITY, _AFFINITY = 0.99, 0.80
_MOST_PENALTY = 5.0  # seconds of TTFT
_EXPLORES = 0.01
_TTFT_WEIGHT, _TPOT_WEIGHT = 0.8, 0.2


@dataclass(frozen=True, slots=True)
class _Scored:
    candidate: Candidate
    prefix: float
    ttft: float
    headroom: tuple[float, float]

    @property
    def positive(self) -> bool:
        return min(self.headroom) >= 0


def predicted_latency(
    candidates: Sequence[Candidate],
    predictions: Sequence[Prediction],
    slo: SLO | None,
    now: float,
    tokens: int,
    random: Random,
    most: bool = False,
) -> Candidate:
    """The candidate for a prompt of `tokens`. `most`: the one with the most headroom, not the least."""
    scored = [
        _Scored(each, each.overlap / tokens, prediction.ttft.expected, _headroom(prediction, slo, now))
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


def _headroom(prediction: Prediction, slo: SLO | None, now: float) -> tuple[float, float]:
    """What is promised less what is predicted; nothing is short of what was not promised where anything was."""
    ttft, tpot = -prediction.ttft.expected, -prediction.tpot.expected
    if slo is None:
        return ttft, tpot
    by, each = slo.first_token_by, slo.tpot
    return (0.0 if by is None else ttft + by - now), (0.0 if each is None else tpot + each)


def _sticky(scored: list[_Scored], affinity: float, random: Random) -> list[_Scored]:
    """Those that hold so much of the prompt, where there are any and they are not much slower."""
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
