"""The plain policies of the settings: by turn, at random, by load, by session, and by SGLang's rule.

A comment names the source of a constant: repository, file and commit.
"""

from __future__ import annotations

from math import ceil
from random import Random

from xxhash import xxh3_64_intdigest

from router.policies.linear import Line, LinearPolicy
from router.policies.records import ByTurn, Candidate, CostUnit, Decision, Policy, Request, cheapest

# sgl-project/sglang, sgl-model-gateway/bindings/python/src/sglang_router/router_args.py at 6614f98405b9: the defaults
# of cache_threshold, balance_abs_threshold and balance_rel_threshold.
_SGLANG_THRESHOLD = 0.3
_SGLANG_DIFFERENCE = 64
_SGLANG_RATIO = 1.5
# The default load factor of implementations of arXiv 1608.01350, such as apache/brpc's
# chash_bounded_load_factor (c7b180164cbf).
_BOUND = 1.25


class RoundRobin(ByTurn):
    """A policy that chooses one target after the other."""

    def __init__(self) -> None:
        self._turns = 0

    def turn(self, candidates: int) -> int:
        turn = self._turns
        self._turns = turn + 1
        return turn % candidates

    def decision(self, candidates: list[Candidate], turn: int) -> Decision:
        def terms(candidate: Candidate) -> dict[str, float]:
            place = next(place for place, each in enumerate(candidates) if each is candidate)
            return {"turn": float((place - turn) % len(candidates))}

        return Decision(candidates[turn], candidates, terms, free=True, unit=CostUnit.TURNS)


class AtRandom(ByTurn):
    """A policy that chooses any target."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def turn(self, candidates: int) -> int:
        return self._random.randrange(candidates)

    def decision(self, candidates: list[Candidate], turn: int) -> Decision:
        return Decision(candidates[turn], candidates, lambda _: {}, free=True, unit=CostUnit.TURNS)


class LeastLoaded(LinearPolicy):
    """A policy that chooses the target with the fewest requests in flight, whatever is cached."""

    def __init__(self, random: Random) -> None:
        super().__init__(random, unit=CostUnit.REQUESTS)

    def line(self, candidate: Candidate) -> Line:
        return float(candidate.requests), 0.0, 0.0

    def terms(self, candidate: Candidate, request: Request) -> dict[str, float]:  # noqa: ARG002
        return _requests(candidate)


def _requests(candidate: Candidate) -> dict[str, float]:
    return {"requests": candidate.requests}


def session_affinity(random: Random) -> Policy:
    """Return a policy of consistent hashing by session with bounded loads: https://arxiv.org/abs/1608.01350

    Every session has its own order of all targets. Rendezvous hashing moves only the sessions of a target that is added
    or removed. The first target wins that has at most 1.25 times the mean requests in flight. A request without a
    session is sent to the least loaded target.
    """

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        session = request.beginning if request.session is None else request.session
        if session is None:
            return cheapest(candidates, _requests, random, unit=CostUnit.REQUESTS)
        bound = ceil(_BOUND * (sum(c.requests for c in candidates) + 1) / len(candidates))

        def terms(candidate: Candidate) -> dict[str, float]:
            target = candidate.target
            place = xxh3_64_intdigest(f"{session}\n{target.worker}\n{target.dp_rank}".encode()) / 2**64
            return {"place": place, "over bound": float(candidate.requests >= bound)}

        return cheapest(candidates, terms, random, unit=CostUnit.SCORE)

    return choose


def cache_aware(random: Random) -> Policy:
    """Return SGLang's policy: the longest match above 0.3 of the prompt, or else the least loaded target.

    The least loaded target also wins while loads are unbalanced: the highest load exceeds the lowest by more than 64
    requests and is more than 1.5 times as high.
    """

    def choose(candidates: list[Candidate], request: Request) -> Decision:
        loads = [candidate.requests for candidate in candidates]
        low, high = min(loads), max(loads)
        unbalanced = high - low > _SGLANG_DIFFERENCE and high > _SGLANG_RATIO * low
        longest = max(candidate.overlap for candidate in candidates)
        if unbalanced or longest <= _SGLANG_THRESHOLD * request.tokens:
            return cheapest(candidates, _requests, random, unit=CostUnit.REQUESTS)
        return cheapest(candidates, lambda candidate: {"unmatched": request.tokens - candidate.overlap}, random)

    return choose
