"""The rules of other routers, as benchmarks play them."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.policy import rivals
from indexer import Target
from router.policies import Candidate, Policy, Request, made
from router.settings import PolicySettings


def candidate(name: str, overlap: int = 0, requests: int = 0, pending: int = 0, context: int = 0) -> Candidate:
    return Candidate(Target(name, 0, "m"), overlap, requests, pending, context)


def chosen(policy: Policy, candidates: list[Candidate], tokens: int = 1000) -> str:
    return policy(candidates, Request(tokens)).chosen.target.worker


@pytest.mark.parametrize("rule", rivals.RIVALS)
def test_every_rule_explains_a_choice_among_the_candidates(rule: str) -> None:
    policy = made(rivals.RIVALS[rule], PolicySettings(), Random(1)).choose
    candidates = [candidate("a", overlap=500, requests=2, context=2000), candidate("b", pending=100, requests=1)]
    for session in (None, "ann"):
        decision = policy(candidates, Request(1000, 200, session))
        assert decision.chosen in candidates
        assert [cost.candidate for cost in decision.costs] == candidates
        totals = [cost.total for cost in decision.costs]
        assert totals[candidates.index(decision.chosen)] == min(totals)
    assert chosen(policy, [candidate("a")], tokens=0) == "a"


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ({"overlap": 500, "context": 600}, {}, "b"),
        ({"overlap": 500, "context": 400}, {}, "a"),
        ({"overlap": 500, "pending": 400}, {}, "a"),
    ],
)
def test_dynamo_adds_the_tokens_to_compute_and_those_held(a: dict[str, int], b: dict[str, int], expected: str) -> None:
    assert chosen(rivals.Dynamo(Random(0)), [candidate("a", **a), candidate("b", **b)]) == expected


def test_dynamo_credits_slower_tiers_with_less() -> None:
    policy = rivals.Dynamo(Random(0))
    on_disk = Candidate(Target("disk", 0, "m"), 800, disk=800)
    in_host = Candidate(Target("host", 0, "m"), 800, cpu=800)
    assert policy([on_disk, in_host], Request(1000)).costs[0].terms["prefill"] == pytest.approx(800)
    assert policy([on_disk, in_host], Request(1000)).costs[1].terms["prefill"] == pytest.approx(400)


def test_llm_d_weighs_queue_memory_and_prefix() -> None:
    holder = Candidate(Target("holder", 0, "m"), overlap=1000, waiting=4, kv_usage=0.9)
    idle = Candidate(Target("idle", 0, "m"), kv_usage=0.5)
    decision = rivals.llm_d(Random(0))([holder, idle], Request(1000))
    assert [cost.terms for cost in decision.costs] == [
        {"queue": 2.0, "memory": pytest.approx(1.8), "uncached": 0.0},
        {"queue": 0.0, "memory": pytest.approx(1.0), "uncached": 3.0},
    ]


def test_unknown_kv_usage_counts_as_the_highest() -> None:
    policy = rivals.llm_d(Random(0))
    full, free = (Candidate(Target(name, 0, "m"), kv_usage=usage) for name, usage in (("full", 0.8), ("free", 0.2)))
    silent = candidate("silent")
    assert [cost.terms["memory"] for cost in policy([silent, full, free], Request(10)).costs] == [1.6, 1.6, 0.4]
    assert policy([silent], Request(10)).costs[0].terms["memory"] == 2.0


def test_lmetric_multiplies() -> None:
    policy = rivals.Lmetric(Random(0))
    decision = policy([candidate("a", overlap=400, pending=100, requests=3)], Request(1000))
    assert decision.costs[0].total == 700 * 4


def test_mooncake_estimates_the_time_to_first_token() -> None:
    policy = rivals.Mooncake(Random(0), cpu_token=0.1, disk_token=0.5)
    decision = policy([candidate("a", overlap=400, pending=100, requests=9)], Request(1000))
    assert decision.costs[0].total == 700


def test_preble_exploits_long_matches_and_spreads_other_prompts_by_load() -> None:
    policy = rivals.Preble(Random(0))
    warm, cold = candidate("warm", overlap=400), candidate("cold")
    assert chosen(policy, [warm, cold]) == "warm"  # explores: nothing was sent yet
    assert chosen(policy, [warm, cold]) == "cold"
    longest = candidate("warm", overlap=501)
    assert {chosen(policy, [longest, cold]) for _ in range(9)} == {"warm"}
    twin = candidate("twin", overlap=501)
    assert chosen(policy, [longest, twin, cold]) == "twin"


def test_preble_forgets_load_after_three_minutes() -> None:
    policy = rivals.Preble(Random(0))
    both = [candidate("a", overlap=100), candidate("b")]
    for at, expected in ((0.0, "a"), (179.0, "b"), (400.0, "a")):
        assert policy(both, Request(1000, at=at)).chosen.target.worker == expected
