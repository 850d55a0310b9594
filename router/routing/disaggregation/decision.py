"""Which decode worker, whether another worker computes the prompt, and which.

    decode   the least loaded; what it holds of the prompt decides only between equals
    remote   another computes the prompt, unless little of it is left to compute on the decode worker, which is free:
             uncached < skip_tokens and uncached / prompt < skip_ratio; or unless all prefill workers are saturated
             and the decode worker is not
    prefill  the lowest of: prefill tokens queued there + tokens of the prompt not cached there

What is cached is counted in raw tokens, whatever the tier. A decode worker whose load is not known is not free.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

from indexer.targets import WorkerNames
from router.policies import Candidate, Decision, Policy, Request
from router.policies.records import CostUnit, cheapest
from router.settings import DisaggregationSettings

# Decides between workers with the same number of requests, and no more.
_TIE = 0.4


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Whether another worker computes a prompt: `prefill` is the choice of it, None when the decode worker does.

    `inputs`: what the decision came from, for logs and explanations.
    """

    prefill: Decision | None
    reason: str
    inputs: dict[str, Any]

    def as_json(self, names: WorkerNames) -> dict[str, Any]:
        """For the explanation of a decision; `names`: what workers are called there."""
        report: dict[str, Any] = {"remote_prefill": self.prefill is not None, "reason": self.reason, **self.inputs}
        if self.prefill is not None:
            target = self.prefill.chosen.target
            report["prefill"] = {"worker": names.get(target.worker), "dp_rank": target.dp_rank}
            report["unit"] = self.prefill.unit
            report["prefill_candidates"] = [
                {"worker": names.get(each.target.worker), "dp_rank": each.target.dp_rank, "terms": cost.terms}
                for cost in self.prefill.costs
                for each in (cost.candidate,)
            ]
        return report


def decode_policy(random: Random) -> Policy:
    """The least loaded candidate."""

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        most = max(candidate.context for candidate in candidates) + 1

        def terms(candidate: Candidate) -> dict[str, float]:
            return {
                "requests": float(candidate.requests),
                "context": _TIE * candidate.context / most,
                "uncached": _TIE * (1 - candidate.overlap / (request.tokens + 1)),
            }

        return cheapest(candidates, terms, random, unit=CostUnit.REQUESTS)

    return choose


def prefill_policy(random: Random) -> Policy:
    """The candidate with the least to compute before this prompt is done."""

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        def terms(candidate: Candidate) -> dict[str, float]:
            return {
                "queued": float(candidate.pending),
                "prefill": float(max(request.tokens - candidate.overlap, 0)),
            }

        return cheapest(candidates, terms, random)

    return choose


def disaggregate(
    decode: Candidate,
    prefills: list[Candidate],
    request: Request,
    policy: Policy,
    settings: DisaggregationSettings,
    decodes_alone: bool,
) -> Disaggregation:
    """Decide for a prompt whose decode worker is chosen. `decodes_alone`: it can compute a prompt itself."""
    uncached = max(request.tokens - decode.overlap, 0)
    free = decode.kv_usage is not None and not decode.waiting and decode.pending < settings.skip_tokens
    saturated = all(candidate.pending >= settings.saturated_tokens for candidate in prefills)
    inputs: dict[str, Any] = {
        "tokens": request.tokens,
        "uncached": uncached,
        "decode_pending": decode.pending,
        "decode_waiting": decode.waiting,
        "decode_load_known": decode.kv_usage is not None,
        "prefill_workers_saturated": saturated,
    }
    if not prefills:
        return Disaggregation(None, "no prefill worker is left", inputs)
    if decodes_alone and free:
        short = uncached < settings.skip_tokens
        if short and (not request.tokens or uncached / request.tokens < settings.skip_ratio):
            return Disaggregation(None, "little is left to compute", inputs)
        if saturated:
            return Disaggregation(None, "all prefill workers are saturated", inputs)
    return Disaggregation(policy(prefills, request), "remote", inputs)
