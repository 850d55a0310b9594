"""Where a request should go: one pure function from candidates to a choice, with every term of its cost.

The cost of a target is counted in prefill tokens; the lowest wins, ties at random:

    J = pending + u · (1 + β + γ·n) + φ·ctx

`u` uncached tokens of the prompt (at least 1), `pending` uncached tokens already sent there whose first byte has not
come, `n` requests in flight, `ctx` the tokens they hold. A prefill delays everybody who decodes on that worker, so an
uncached token is charged more than once (β, γ), and prefixes stay together until the queue really hurts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random

from indexer import Target


@dataclass(frozen=True, slots=True)
class Candidate:
    """A target that could take the request, all in tokens but `requests`.

    `overlap`: tokens of the prompt it would serve from its cache. `pending`: uncached tokens sent to it whose first
    byte has not come. `context`: tokens that its requests in flight hold.
    """

    target: Target
    overlap: int = 0
    requests: int = 0
    pending: int = 0
    context: int = 0


@dataclass(frozen=True, slots=True)
class Cost:
    """What choosing a candidate would cost, term by term."""

    candidate: Candidate
    terms: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice and what every candidate would have cost."""

    choice: Candidate
    costs: list[Cost]


@dataclass(frozen=True, slots=True)
class KvWeights:
    """β, γ and φ of the cost."""

    interference: float = 1.0
    interference_per_request: float = 0.06
    context: float = 0.05


# (candidates, tokens of the prompt) → decision. Candidates are never empty.
Policy = Callable[[Sequence[Candidate], int], Decision]


def kv_aware(weights: KvWeights, random: Random) -> Policy:
    """The cost above."""

    def choose(candidates: Sequence[Candidate], tokens: int) -> Decision:
        return _cheapest([Cost(c, kv_cost(c, tokens, weights)) for c in candidates], random)

    return choose


def kv_cost(candidate: Candidate, tokens: int, weights: KvWeights) -> dict[str, float]:
    """The terms of the cost of a prompt of so many tokens on a candidate."""
    uncached = max(tokens - candidate.overlap, 1)
    return {
        "pending": candidate.pending,
        "prefill": uncached,
        "interference": uncached * (weights.interference + weights.interference_per_request * candidate.requests),
        "context": weights.context * candidate.context,
    }


def least_loaded(random: Random) -> Policy:
    """The fewest requests in flight; what the caches hold plays no part."""

    def choose(candidates: Sequence[Candidate], tokens: int) -> Decision:  # noqa: ARG001
        return _cheapest([Cost(c, {"requests": c.requests}) for c in candidates], random)

    return choose


def round_robin() -> Policy:
    """One target after the other."""
    turns = count()

    def choose(candidates: Sequence[Candidate], tokens: int) -> Decision:  # noqa: ARG001
        turn = next(turns) % len(candidates)
        costs = [Cost(c, {"turn": float((place - turn) % len(candidates))}) for place, c in enumerate(candidates)]
        return Decision(candidates[turn], costs)

    return choose


def _cheapest(costs: list[Cost], random: Random) -> Decision:
    lowest = min(cost.total for cost in costs)
    return Decision(random.choice([cost.candidate for cost in costs if cost.total == lowest]), costs)
