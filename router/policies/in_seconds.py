"""The cost of the default policy in seconds, for fleets of unlike workers whose rates are known.

    J = Q + P · (1 + β + γ·n + θ·μ) + D

    Q   what the prefills sent there still take
    P   this prompt's own prefill: a·u + q·u·(c + u/2) + steps · (t0 + d·ctx + a·n)
    D   decoding slowed, the new request by the others and they by it:
        output · (κ_own · (a·n + d·ctx) + κ_ext · n · (a + d·tokens))

`u` uncached and `c` cached tokens of the prompt, `n` requests in flight and `ctx` the tokens they hold, `steps` the
engine steps its prefill takes, `output` the tokens that its answer is expected to have.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.policies.rates import prefill_seconds
from router.policies.records import Candidate, Request


@dataclass(frozen=True, slots=True)
class SecondsWeights:
    """β, γ, θ, κ_own, κ_ext."""

    interference: float = 1.0
    interference_per_request: float = 0.03
    eviction: float = 10.0
    slowed_by_others: float = 0.4
    slowing_others: float = 0.4


def seconds_cost(candidate: Candidate, request: Request, weights: SecondsWeights) -> dict[str, float]:
    """The terms of the cost, in seconds. The candidate has rates."""
    rates = candidate.rates
    assert rates is not None
    n, context = candidate.requests, candidate.context
    prefill = prefill_seconds(rates, request.tokens, candidate.overlap, n, context)
    slowed = weights.slowed_by_others * (rates.token * n + rates.context_token * context)
    slowing = weights.slowing_others * n * (rates.token + rates.context_token * request.tokens)
    return {
        "pending": candidate.backlog,
        "prefill": prefill,
        "interference": prefill * (weights.interference + weights.interference_per_request * n),
        "eviction": prefill * weights.eviction * candidate.eviction,
        "decode": request.output_tokens * (slowed + slowing),
    }
