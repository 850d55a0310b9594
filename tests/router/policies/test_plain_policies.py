"""The plain policies: by turn, at random, by load, by session, by SGLang's rule."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from indexer import Target
from router.policies import Candidate, Policy, Request, plain, policy_named
from router.settings import PolicyName, PolicySettings


def candidate(name: str, overlap: int = 0, requests: int = 0, pending: int = 0, context: int = 0) -> Candidate:
    return Candidate(Target(name, 0, "m"), overlap, requests, pending, context)


def chosen(policy: Policy, candidates: list[Candidate], tokens: int = 1000, session: str | None = None) -> str:
    return policy(candidates, Request(tokens, session=session)).chosen.target.worker


@pytest.mark.parametrize("name", PolicyName)
def test_every_policy_explains_a_choice_among_the_candidates(name: PolicyName) -> None:
    policy = policy_named(PolicySettings(name=name), Random(1)).choose
    candidates = [candidate("a", overlap=500, requests=2, context=2000), candidate("b", pending=100, requests=1)]
    for session in (None, "ann"):
        decision = policy(candidates, Request(1000, 200, session))
        assert decision.chosen in candidates
        assert [cost.candidate for cost in decision.costs] == candidates
        totals = [cost.total for cost in decision.costs]
        assert totals[candidates.index(decision.chosen)] == min(totals)


@pytest.mark.parametrize("name", PolicyName)
def test_a_single_candidate_is_chosen(name: PolicyName) -> None:
    assert chosen(policy_named(PolicySettings(name=name), Random(1)).choose, [candidate("a")], tokens=0) == "a"


def test_round_robin_takes_turns() -> None:
    policy = plain.RoundRobin()
    candidates = [candidate("a", overlap=1000), candidate("b", requests=9), candidate("c")]
    decisions = [policy(candidates, Request(1000)) for _ in range(6)]
    assert [decision.chosen.target.worker for decision in decisions] == ["a", "b", "c"] * 2
    for decision in decisions:
        assert min(decision.costs, key=lambda cost: cost.total).candidate is decision.chosen


def test_round_robin_continues_after_a_lost_candidate() -> None:
    policy = plain.RoundRobin()
    chosen(policy, [candidate("a"), candidate("b"), candidate("c")])
    assert {chosen(policy, [candidate("a"), candidate("b")]) for _ in range(2)} == {"a", "b"}


def test_random_policy_needs_no_prompt() -> None:
    policy = plain.AtRandom(Random(0))
    counts = Counter(chosen(policy, [candidate("a", requests=99), candidate("b", overlap=1000)]) for _ in range(400))
    assert min(counts["a"], counts["b"]) > 150


def test_least_loaded_breaks_ties_at_random() -> None:
    policy = plain.LeastLoaded(Random(0))
    assert {chosen(policy, [candidate("a"), candidate("b")]) for _ in range(50)} == {"a", "b"}


def test_session_keeps_its_target() -> None:
    policy = plain.session_affinity(Random(0))
    names = "abcdefgh"
    homes = {
        session: chosen(policy, [candidate(name) for name in names], session=session) for session in map(str, range(99))
    }
    assert set(homes.values()) == set(names)
    for session, home in homes.items():
        assert chosen(policy, [candidate(name) for name in reversed(names)], session=session) == home


def test_removed_target_moves_only_its_sessions() -> None:
    policy = plain.session_affinity(Random(0))
    for session in map(str, range(99)):
        home = chosen(policy, [candidate(name) for name in "abcd"], session=session)
        after = chosen(policy, [candidate(name) for name in "abc"], session=session)
        assert after == home or home == "d"


def test_session_leaves_an_overloaded_target() -> None:
    """With 40 requests in flight on four targets, one may have 13."""
    policy = plain.session_affinity(Random(0))
    home = chosen(policy, [candidate(name) for name in "abcd"], session="ann")
    for requests, stays in ((12, True), (13, False)):
        others = [candidate(name, requests=(40 - requests) // 3) for name in "abcd" if name != home]
        assert (chosen(policy, [*others, candidate(home, requests=requests)], session="ann") == home) is stays


@pytest.mark.parametrize(
    ("policy", "a", "b", "expected"),
    [
        # The least loaded counts requests only, and is taken without a session.
        (plain.LeastLoaded, {"overlap": 1000, "requests": 2}, {"requests": 1, "pending": 9999}, "b"),
        (plain.session_affinity, {"requests": 1}, {}, "b"),
        # Cache-aware routing takes the longest match above its threshold, and balances unequal loads.
        (plain.cache_aware, {"overlap": 301, "requests": 60}, {}, "a"),
        (plain.cache_aware, {"overlap": 300, "requests": 60}, {}, "b"),
        (plain.cache_aware, {"overlap": 999, "requests": 65}, {}, "b"),
        (plain.cache_aware, {"overlap": 999, "requests": 64}, {}, "a"),
        (plain.cache_aware, {"overlap": 999, "requests": 300}, {"requests": 200}, "a"),
    ],
)
def test_choice_between_two(policy: Any, a: dict[str, int], b: dict[str, int], expected: str) -> None:
    assert chosen(policy(Random(0)), [candidate("a", **a), candidate("b", **b)]) == expected
