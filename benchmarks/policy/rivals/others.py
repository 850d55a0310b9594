"""The rules of LMetric, Mooncake, smg and AIBrix."""

from __future__ import annotations

from random import Random
from statistics import mean, stdev
from typing import Final

from benchmarks.policy.rivals.rule import Parts
from router.policies.linear import Line, LinearPolicy
from router.policies.records import Candidate, CostUnit, Decision, Policy, Request, cheapest

# lightseekorg/smg at 73da68ca, the defaults of balance_abs_threshold and balance_rel_threshold.
_SMG_DIFFERENCE: Final = 64
_SMG_RATIO: Final = 1.5
# vllm-project/aibrix, pkg/plugins/gateway/algorithms/prefix_cache.go at e3e10f9e: the defaults of
# AIBRIX_PREFIX_CACHE_POD_RUNNING_REQUEST_IMBALANCE_ABS_COUNT and AIBRIX_PREFIX_CACHE_STANDARD_DEVIATION_FACTOR.
_AIBRIX_DIFFERENCE: Final = 8
_AIBRIX_DEVIATIONS: Final = 1
# A term of this size excludes a candidate while others are left, and one of the next size orders equal ones.
_LAST: Final = 1e9


class Lmetric(LinearPolicy):
    """LMetric: the tokens to prefill times the requests on the target, this one included:
    https://arxiv.org/abs/2603.15202

    `own`: without the tokens of queued prompts, as in sgl-project/sglang, sgl-model-gateway/src/policies/lmetric.rs at
    acaa759a.
    """

    def __init__(self, random: Random, own: bool = False) -> None:
        super().__init__(random, unit=CostUnit.TOKEN_REQUESTS)
        self._own = own

    def line(self, candidate: Candidate) -> Line:
        requests = candidate.requests + 1
        return float(self._queued(candidate) * requests), float(requests), 0.0

    def terms(self, candidate: Candidate, request: Request) -> dict[str, float]:
        prefill = self._queued(candidate) + max(request.tokens - candidate.overlap, 1)
        return {"prefill times requests": prefill * (candidate.requests + 1)}

    def _queued(self, candidate: Candidate) -> int:
        return 0 if self._own else candidate.pending


def mooncake(parts: Parts) -> Policy:
    """Return the rule of Mooncake's conductor, the least estimated TTFT: https://arxiv.org/abs/2407.00079

    All times are predicted: those of the prompts that were sent to a target, and that of this prompt by its length and
    its prefix. A load from a pool or a peer counts with its own time.
    """

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        def terms(candidate: Candidate) -> dict[str, float]:
            target = candidate.target
            prefill = parts.learned.rates.prefill_seconds(
                target.worker, target.model, request.tokens, candidate.reused, candidate.requests, candidate.context
            )
            load = 0.0 if candidate.source is None else candidate.source.load_seconds
            queued = parts.load.of(target.worker, target.dp_rank).backlog
            return {"queued": queued, "load": load, "prefill": prefill}

        return cheapest(candidates, terms, parts.random, unit=CostUnit.SECONDS)

    return choose


def smg(random: Random) -> Policy:
    """Return smg's rule for workers with events: the longest match, then the fewest requests, then the least cached.

    The least loaded target wins while loads are unbalanced, as in SGLang's rule. There is no least match.
    """

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        loads = [candidate.requests for candidate in candidates]
        low, high = min(loads), max(loads)
        unbalanced = high - low > _SMG_DIFFERENCE and high > _SMG_RATIO * low

        def terms(candidate: Candidate) -> dict[str, float]:
            unmatched = 0 if unbalanced else request.tokens - candidate.overlap
            return {"unmatched": float(unmatched), "requests": candidate.requests / _LAST, **_fuller(candidate)}

        return cheapest(candidates, terms, random)

    return choose


def _fuller(candidate: Candidate) -> dict[str, float]:
    return {"cached": candidate.fuller / _LAST**1.5}


def aibrix(random: Random) -> Policy:
    """Return AIBrix's prefix-cache rule.

    - While loads differ by more than 8 requests, only the least loaded targets are candidates.
    - The longest match wins whose target has at most the mean of requests and one standard deviation, then the fewest
      requests.
    - If none of these holds a part of the prompt, the least loaded target wins.
    """

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        loads = [float(candidate.requests) for candidate in candidates]
        most = mean(loads) + _AIBRIX_DEVIATIONS * (stdev(loads) if len(loads) > 1 else 0.0)
        unbalanced = max(loads) - min(loads) > _AIBRIX_DIFFERENCE

        def terms(candidate: Candidate) -> dict[str, float]:
            excluded = unbalanced and candidate.requests > min(loads)
            matches = candidate.overlap if candidate.requests <= most and not excluded else 0
            unmatched = request.tokens - matches
            return {"excluded": _LAST * excluded, "unmatched": float(unmatched), "requests": candidate.requests / _LAST}

        return cheapest(candidates, terms, random)

    return choose
