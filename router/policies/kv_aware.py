"""The default policy: where a request is answered soonest, counting what its prefill does to the others there.

The cost of a target is counted in prefill tokens, and needs no rates; the lowest wins, ties at random:

    J = pending + transfer + u · (1 + β + γ·n + θ·μ) + φ·ctx

    u         uncached tokens of the prompt, at least 1
    pending   uncached tokens already sent there whose first byte has not come
    transfer  cached tokens in CPU memory or on disk, each at the price of loading it
    n, ctx    requests in flight there, and the tokens they hold
    μ         0 while the target evicts nothing, else g/(1-g) (`router.learning.eviction_pressure`)

A prefill delays every request that decodes on that worker (β, γ), and evicts what will be asked for again (θ). So an
uncached token is charged more than its own time, and prefixes stay together until the queue really hurts.

Where workers are unlike and their rates are known, the same is counted in seconds (`router.policies.in_seconds`).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from router.policies.in_seconds import SecondsWeights, seconds_cost
from router.policies.records import Candidate, Decision, Policy, Request, cheapest, one_of_lowest


@dataclass(frozen=True, slots=True)
class KvWeights:
    """β, γ, θ, φ, and the price of loading a token from CPU memory or disk as a share of computing it.

    `near`: costs that are higher than the lowest by this share at most count as tied.
    """

    interference: float = 1.0
    interference_per_request: float = 0.06
    eviction: float = 10.0
    context: float = 0.05
    cpu_token: float = 0.1
    disk_token: float = 0.5
    near: float = 0.0


def kv_aware(weights: KvWeights, random: Random) -> Policy:
    """The cost above; in seconds when the candidates have rates."""
    in_seconds = SecondsWeights(interference=weights.interference, eviction=weights.eviction)

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        if candidates[0].rates and all(candidate.rates for candidate in candidates):
            return cheapest(candidates, lambda each: seconds_cost(each, request, in_seconds), random, weights.near)
        totals = kv_totals(candidates, request.tokens, weights)
        chosen = one_of_lowest(candidates, totals, random, weights.near)
        return Decision(chosen, candidates, lambda candidate: kv_cost(candidate, request.tokens, weights))

    return choose


def kv_cost(candidate: Candidate, tokens: int, weights: KvWeights) -> dict[str, float]:
    """The terms of the cost of a prompt of `tokens` on a candidate, in prefill tokens."""
    uncached = max(tokens - candidate.overlap, 1)
    return {
        "pending": candidate.pending,
        "transfer": weights.cpu_token * candidate.cpu + weights.disk_token * candidate.disk,
        "prefill": uncached,
        "interference": uncached * (weights.interference + weights.interference_per_request * candidate.requests),
        "eviction": uncached * weights.eviction * candidate.eviction,
        "context": weights.context * candidate.context,
    }


def kv_totals(candidates: list[Candidate], tokens: int, weights: KvWeights) -> list[float]:
    """The sums of those terms, in one pass: there may be thousands of candidates."""
    each = 1 + weights.interference
    per_request, eviction, context = weights.interference_per_request, weights.eviction, weights.context
    cpu, disk = weights.cpu_token, weights.disk_token
    return [
        c.pending
        + (cpu * c.cpu + disk * c.disk if c.cpu or c.disk else 0.0)
        + (uncached if (uncached := tokens - c.overlap) > 1 else 1)
        * (each + per_request * c.requests + eviction * c.eviction)
        + context * c.context
        for c in candidates
    ]
