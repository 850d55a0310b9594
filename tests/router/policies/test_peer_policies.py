"""Policies of other routers."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pytest

from indexer import Target
from router.policies import Candidate, Policy, Request, peers, policy_named
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
    policy = peers.RoundRobin()
    candidates = [candidate("a", overlap=1000), candidate("b", requests=9), candidate("c")]
    decisions = [policy(candidates, Request(1000)) for _ in range(6)]
    assert [decision.chosen.target.worker for decision in decisions] == ["a", "b", "c"] * 2
    for decision in decisions:
        assert min(decision.costs, key=lambda cost: cost.total).candidate is decision.chosen


def test_round_robin_continues_after_a_lost_candidate() -> None:
    policy = peers.RoundRobin()
    chosen(policy, [candidate("a"), candidate("b"), candidate("c")])
    assert {chosen(policy, [candidate("a"), candidate("b")]) for _ in range(2)} == {"a", "b"}


def test_random_policy_needs_no_prompt() -> None:
    policy = peers.AtRandom(Random(0))
    counts = Counter(chosen(policy, [candidate("a", requests=99), candidate("b", overlap=1000)]) for _ in range(400))
    assert min(counts["a"], counts["b"]) > 150


def test_least_loaded_breaks_ties_at_random() -> None:
    policy = peers.LeastLoaded(Random(0))
    assert {chosen(policy, [candidate("a"), candidate("b")]) for _ in range(50)} == {"a", "b"}


def test_session_keeps_its_target() -> None:
    policy = peers.session_affinity(Random(0))
    names = "abcdefgh"
    homes = {
        session: chosen(policy, [candidate(name) for name in names], session=session) for session in map(str, range(99))
    }
    assert set(homes.values()) == set(names)
    for session, home in homes.items():
        assert chosen(policy, [candidate(name) for name in reversed(names)], session=session) == home


def test_removed_target_moves_only_its_sessions() -> None:
    policy = peers.session_affinity(Random(0))
    for session in map(str, range(99)):
        home = chosen(policy, [candidate(name) for name in "abcd"], session=session)
        after = chosen(policy, [candidate(name) for name in "abc"], session=session)
        assert after == home or home == "d"


def test_session_leaves_an_overloaded_target() -> None:
    """With 40 requests in flight on four targets, one may have 13."""
    policy = peers.session_affinity(Random(0))
    home = chosen(policy, [candidate(name) for name in "abcd"], session="ann")
    for requests, stays in ((12, True), (13, False)):
        others = [candidate(name, requests=(40 - requests) // 3) for name in "abcd" if name != home]
        assert (chosen(policy, [*others, candidate(home, requests=requests)], session="ann") == home) is stays


@pytest.mark.parametrize(
    ("policy", "a", "b", "expected"),
    [
        # The least loaded counts requests only, and is taken without a session.
        (peers.LeastLoaded, {"overlap": 1000, "requests": 2}, {"requests": 1, "pending": 9999}, "b"),
        (peers.session_affinity, {"requests": 1}, {}, "b"),
        # Cache-aware routing takes the longest match above its threshold, and balances unequal loads.
        (peers.cache_aware, {"overlap": 301, "requests": 60}, {}, "a"),
        (peers.cache_aware, {"overlap": 300, "requests": 60}, {}, "b"),
        (peers.cache_aware, {"overlap": 999, "requests": 65}, {}, "b"),
        (peers.cache_aware, {"overlap": 999, "requests": 64}, {}, "a"),
        (peers.cache_aware, {"overlap": 999, "requests": 300}, {"requests": 200}, "a"),
        # Dynamo adds the tokens to compute and those held.
        (peers.Dynamo, {"overlap": 500, "context": 600}, {}, "b"),
        (peers.Dynamo, {"overlap": 500, "context": 400}, {}, "a"),
        (peers.Dynamo, {"overlap": 500, "pending": 400}, {}, "a"),
    ],
)
def test_choice_between_two(policy: Any, a: dict[str, int], b: dict[str, int], expected: str) -> None:
    assert chosen(policy(Random(0)), [candidate("a", **a), candidate("b", **b)]) == expected


def test_dynamo_credits_slower_tiers_with_less() -> None:
    policy = peers.Dynamo(Random(0))
    on_disk = Candidate(Target("disk", 0, "m"), 800, disk=800)
    in_host = Candidate(Target("host", 0, "m"), 800, cpu=800)
    assert policy([on_disk, in_host], Request(1000)).costs[0].terms["prefill"] == pytest.approx(800)
    assert policy([on_disk, in_host], Request(1000)).costs[1].terms["prefill"] == pytest.approx(400)


def test_llm_d_weighs_queue_memory_and_prefix() -> None:
    holder = Candidate(Target("holder", 0, "m"), overlap=1000, waiting=4, kv_usage=0.9)
    idle = Candidate(Target("idle", 0, "m"), kv_usage=0.5)
    decision = peers.llm_d(Random(0))([holder, idle], Request(1000))
    assert [cost.terms for cost in decision.costs] == [
        {"queue": 2.0, "memory": pytest.approx(1.8), "uncached": 0.0},
        {"queue": 0.0, "memory": pytest.approx(1.0), "uncached": 3.0},
    ]


def test_unknown_kv_usage_counts_as_the_highest() -> None:
    policy = peers.llm_d(Random(0))
    full, free = (Candidate(Target(name, 0, "m"), kv_usage=usage) for name, usage in (("full", 0.8), ("free", 0.2)))
    silent = candidate("silent")
    assert [cost.terms["memory"] for cost in policy([silent, full, free], Request(10)).costs] == [1.6, 1.6, 0.4]
    assert policy([silent], Request(10)).costs[0].terms["memory"] == 2.0


def test_lmetric_multiplies() -> None:
    policy = peers.Lmetric(Random(0))
    decision = policy([candidate("a", overlap=400, pending=100, requests=3)], Request(1000))
    assert decision.costs[0].total == 700 * 4


def test_mooncake_estimates_the_time_to_first_token() -> None:
    policy = peers.Mooncake(Random(0), cpu_token=0.1, disk_token=0.5)
    decision = policy([candidate("a", overlap=400, pending=100, requests=9)], Request(1000))
    assert decision.costs[0].total == 700


def test_preble_exploits_long_matches_and_spreads_other_prompts_by_load() -> None:
    policy = peers.Preble(Random(0))
    warm, cold = candidate("warm", overlap=400), candidate("cold")
    assert chosen(policy, [warm, cold]) == "warm"  # explores: nothing was sent yet
    assert chosen(policy, [warm, cold]) == "cold"
    longest = candidate("warm", overlap=501)
    assert {chosen(policy, [longest, cold]) for _ in range(9)} == {"warm"}
    twin = candidate("twin", overlap=501)
    assert chosen(policy, [longest, twin, cold]) == "twin"


def test_preble_forgets_load_after_three_minutes() -> None:
    policy = peers.Preble(Random(0))
    both = [candidate("a", overlap=100), candidate("b")]
    for at, expected in ((0.0, "a"), (179.0, "b"), (400.0, "a")):
        assert policy(both, Request(1000, at=at)).chosen.target.worker == expected
