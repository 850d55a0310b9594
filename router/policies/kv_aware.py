"""The default policy: where a request is answered soonest, counting what its prefill does to the others there.

The cost of a target is counted in prefill tokens, and needs no rates; the lowest wins, ties at random:

    J = pending + transfer + u · (1 + β + γ·n + θ·μ) + φ·ctx

    u         uncached tokens of the prompt, at least 1
    pending   uncached tokens already sent there whose first byte has not come
    transfer  cached tokens in CPU memory or on disk, each at the price of loading it
    n, ctx    requests in flight there, and the tokens they hold
    μ         0 while the target evicts nothing, else g/(1-g) (`router.prediction.eviction_pressure`)

A prefill delays every request that decodes on that worker (β, γ), and evicts what will be asked for again (θ). So an
uncached token is charged more than its own time, and prefixes stay together until the queue really hurts.

Where workers are unlike and their rates are known, the same is counted in seconds (`router.policies.in_seconds`).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from router.policies.in_seconds import SecondsWeights, seconds_cost
from router.policies.linear import LinearPolicy
from router.policies.records import Candidate, CostUnit, Decision, Request, cheapest


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


class KvAware(LinearPolicy):
    """The cost above; in seconds when the candidates have rates."""

    def __init__(self, weights: KvWeights, random: Random) -> None:
        super().__init__(random, weights.cpu_token, weights.disk_token, weights.near)
        self._weights = weights
        self._in_seconds = SecondsWeights(interference=weights.interference, eviction=weights.eviction)
        self._context = weights.context
        self._per_token = 1 + weights.interference
        self._per_request = weights.interference_per_request
        self._eviction = weights.eviction

    def line(self, candidate: Candidate) -> tuple[float, float]:
        return (
            candidate.pending + self._context * candidate.context,
            self._per_token + self._per_request * candidate.requests + self._eviction * candidate.eviction,
        )

    def terms(self, candidate: Candidate, tokens: int) -> dict[str, float]:
        return kv_cost(candidate, tokens, self._weights)

    def __call__(self, candidates: list[Candidate], request: Request) -> Decision:
        if candidates[0].rates and all(candidate.rates for candidate in candidates):
            in_seconds = self._in_seconds
            return cheapest(
                candidates,
                lambda each: seconds_cost(each, request, in_seconds),
                self.random,
                self.near,
                CostUnit.SECONDS,
            )
        return super().__call__(candidates, request)


def kv_aware(weights: KvWeights, random: Random) -> KvAware:
    """The default policy."""
    return KvAware(weights, random)


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
