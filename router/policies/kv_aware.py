"""The default policy: choose the target that answers soonest, and count the delay that the prefill causes for others.

The cost of a target is counted in prefill tokens and needs no rates. The lowest cost wins, ties at random:

    J = pending + memory + transfer + v·k + load · (1 + β) + (v + loaded) · (θ·μ+δ) + φ·ctx
    k = 1 + β + γ·n + l

    u         uncached tokens of the prompt that are not loaded, at least 1
    v         u without the tokens for which other sessions pay (`router.policies.shared_tokens`), at least 1
    load      the time of the prompt's load from a pool or a peer in computed tokens, without what other sessions pay
    loaded    the tokens that are loaded
    l         loads in flight to the target
    pending   uncached tokens already sent to the target whose first byte was not received
    memory    the expected wait for KV memory (`router.routing.load_view`)
    transfer  cached tokens in CPU memory or on disk, each at the price of loading it
    n, ctx    requests in flight to the target, and the tokens they hold
    φ         γ times the time that a token of context adds to an answer, in computed tokens
    μ         0 while the target has room, else g/(1-g) (`router.prediction.learned`)
    δ         how much fuller the target's cache is than the emptiest one, as a share of its size

The cost is the time that a choice adds to all requests. Time before a first token counts in full, and time between
tokens counts γ. A prefill stops each of the n answers on that worker for its whole time. It delays the first tokens of
later requests (β), and evicts blocks that will be needed again (θ). So an uncached token costs more than its own time,
and prefixes stay together until queues become long. The request's own answer is slower beside others, because each of
its steps reads their context (φ).

μ is known only after something that was evicted is missed. δ spreads new prompts before a cache is full, while another
one has room. When all caches are full, it is 0.

A copy of a shared prefix is computed once and used by many sessions, so each pays its part. This holds only where the
copy finds room. Where it would evict other blocks, each request pays for all of its tokens: v is u.

A loaded token counts as the part of a computed one that its time is, harm included. A load moves a session as computing
does. At its bare time, loads would move sessions for differences too small to matter. Loaded tokens take as much room
as computed ones, so evictions are charged by tokens.

When a load ends, the rest of its prompt is computed behind the prefills that were sent to the target meanwhile. So a
prefill delays the first token of each load in flight (l) by its whole time. A load computes nothing, so it stops
neither answers nor other loads.

If workers have different speeds and their rates are known, the cost is counted in seconds:

    J = Q + M + P·v/u·k + L · (1 + β) + (P·v/u + a·loaded) · (θ·μ + δ) + D

    Q   remaining time of the prefills that were sent to the target
    M   the expected wait for KV memory
    L   the time of the prompt's load from a pool or a peer
    P   the prompt's own prefill: a·u + q·u·(c + u/2) + steps · (t0 + d·ctx + a·n)
    D   slower decoding, of the new request by the others and of the others by it:
        output · (κ_own · (a·n + d·ctx) + κ_ext · n · (a + d·tokens))

Here `c` is the prompt's cached tokens, `steps` the engine steps of its prefill, and `output` the expected tokens of its
answer. a, q, t0 and d are the worker's rates (`router.policies.rates`).
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final, TypeAlias

from router.policies.linear import Line, LinearPolicy
from router.policies.rates import prefill_seconds
from router.policies.records import Candidate, CostUnit, Decision, Request, Source, cheapest
from router.policies.shared_tokens import SharedTokens


@dataclass(frozen=True, slots=True)
class KvWeights:
    """The weights β, γ and θ, and the share of a computed token that loading costs. `near`: the share of a tie."""

    interference: float = 1.0
    interference_per_request: float = 0.25
    eviction: float = 10.0
    cpu_token: float = 0.1
    disk_token: float = 0.5
    near: float = 0.0


# The price of a token on a full cache while another one is empty: that of computing the token that it evicts.
_ROOM: Final = 1.0

# A term of the cost: its name, the part that every prompt pays, and the price of each charged token.
Term: TypeAlias = tuple[str, float, float]


def load_terms(candidate: Candidate, weights: KvWeights) -> list[Term]:
    """Return the terms of a target's load. Their sums are its line in the columns, so a term needs no native code."""
    gamma = weights.interference_per_request
    return [
        ("pending", float(candidate.pending), 0.0),
        ("memory", candidate.memory, 0.0),
        ("prefill", 0.0, 1.0),
        ("interference", 0.0, weights.interference + gamma * candidate.requests + candidate.loads),
        ("eviction", 0.0, room_price(candidate, weights.eviction)),
        ("context", gamma * candidate.context_token * candidate.context, 0.0),
    ]


def room_price(candidate: Candidate, eviction: float) -> float:
    """Return what each token costs for the room that it takes in a target's cache. `eviction`: the weight θ."""
    return eviction * candidate.eviction + _ROOM * candidate.fuller


class KvAware(LinearPolicy):
    """The default policy's cost; in seconds if the candidates have rates."""

    def __init__(self, weights: KvWeights, random: Random) -> None:
        super().__init__(random, weights.cpu_token, weights.disk_token, weights.near)
        self._weights = weights
        self._in_seconds = SecondsWeights(interference=weights.interference, eviction=weights.eviction)

    def line(self, candidate: Candidate) -> Line:
        fixed = per_token = 0.0
        for _, once, each in load_terms(candidate, self._weights):
            fixed += once
            per_token += each
        return fixed, per_token, 0.0 if candidate.eviction else 1.0

    def cost_with(self, candidate: Candidate, source: Source, request: Request) -> float:
        room = room_price(candidate, self._weights.eviction) * source.tokens
        load = _load(candidate, source, request.shared, self._weights) + room
        return self.cost_after(candidate, candidate.reused, request) + load

    def terms(self, candidate: Candidate, request: Request) -> dict[str, float]:
        return kv_cost(candidate, request, self._weights)

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
    """Return the default policy."""
    return KvAware(weights, random)


def kv_cost(candidate: Candidate, request: Request, weights: KvWeights) -> dict[str, float]:
    """Return the terms of the cost of a prompt on a candidate, in prefill tokens."""
    charged = _charged(candidate, request)
    transfer = weights.cpu_token * candidate.cpu + weights.disk_token * candidate.disk
    terms: dict[str, float] = {"pending": 0.0, "transfer": transfer}
    for name, once, each in load_terms(candidate, weights):
        terms[name] = once + charged * each
    source = candidate.source
    if source is not None:
        terms["load"] = _load(candidate, source, request.shared, weights)
        terms["eviction"] += source.tokens * room_price(candidate, weights.eviction)
    return terms


def _charged(candidate: Candidate, request: Request) -> float:
    """Return the uncached tokens without those for which other sessions pay, at least 1."""
    reused = candidate.overlap if candidate.source is None else candidate.reused
    uncached = max(request.tokens - reused, 1)
    if request.shared is None or candidate.eviction:
        return uncached
    return max(uncached - request.shared.after(reused), 1)


def _load(candidate: Candidate, source: Source, shared: SharedTokens | None, weights: KvWeights) -> float:
    """Return the price of a load, in computed tokens. Answers on the target are not stopped by it."""
    return _charged_load(candidate, source, shared) * (1 + weights.interference)


def _charged_load(candidate: Candidate, source: Source, shared: SharedTokens | None) -> float:
    """Return a load in computed tokens, without the part of its own time that other sessions pay.

    A loaded copy of a shared prefix serves these, too. The wait for other loads is the request's own.
    """
    if shared is None or candidate.eviction:
        return source.load
    return source.load - source.own_load * shared.part_of_load(candidate.overlap, candidate.reused)


@dataclass(frozen=True, slots=True)
class SecondsWeights:
    """The weights β, γ, θ, κ_own and κ_ext of the cost in seconds."""

    interference: float = 1.0
    interference_per_request: float = 0.03
    eviction: float = 10.0
    slowed_by_others: float = 0.4
    slowing_others: float = 0.4


def seconds_cost(candidate: Candidate, request: Request, weights: SecondsWeights) -> dict[str, float]:
    """Return the terms of the cost in seconds. The candidate must have rates."""
    rates = candidate.rates
    assert rates is not None
    n, context = candidate.requests, candidate.context
    prefill = prefill_seconds(rates, request.tokens, candidate.reused, n, context)
    uncached = max(request.tokens - candidate.reused, 1)
    charged = prefill * _charged(candidate, request) / uncached
    slowed = weights.slowed_by_others * (rates.token * n + rates.context_token * context)
    slowing = weights.slowing_others * n * (rates.token + rates.context_token * request.tokens)
    harm = weights.interference + weights.interference_per_request * n + candidate.loads
    terms = {
        "pending": candidate.backlog,
        "memory": rates.token * candidate.memory,
        "prefill": charged,
        "interference": charged * harm,
        "eviction": charged * room_price(candidate, weights.eviction),
        "decode": request.output_tokens * (slowed + slowing),
    }
    source = candidate.source
    if source is not None:
        load = _charged_load(candidate, source, request.shared)
        terms["load"] = source.computed_seconds * load * (1 + weights.interference)
        terms["eviction"] += source.computed_seconds * source.tokens * room_price(candidate, weights.eviction)
    return terms
