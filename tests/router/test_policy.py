"""Where a request goes, given what every candidate holds and has to do."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import Target
from router.policy import Candidate, KvWeights, Policy, kv_aware, kv_cost, least_loaded, round_robin

WEIGHTS = KvWeights(interference=1.0, interference_per_request=0.06, context=0.05)


def candidate(name: str, overlap: int = 0, requests: int = 0, pending: int = 0, context: int = 0) -> Candidate:
    return Candidate(Target(name, 0, "m"), overlap, requests, pending, context)


def chosen(policy: Policy, candidates: list[Candidate], tokens: int = 1000) -> str:
    return policy(candidates, tokens).choice.target.worker


def kv(seed: int = 0) -> Policy:
    return kv_aware(WEIGHTS, Random(seed))


def test_the_terms_of_the_cost_by_hand() -> None:
    terms = kv_cost(candidate("w", overlap=600, requests=5, pending=300, context=8000), 1000, WEIGHTS)
    assert terms == {
        "pending": 300,
        "prefill": 400,
        "interference": pytest.approx(400 * (1 + 0.06 * 5)),
        "context": pytest.approx(400),
    }


def test_a_prompt_that_is_held_whole_still_computes_a_token() -> None:
    assert kv_cost(candidate("w", overlap=1000), 1000, WEIGHTS)["prefill"] == 1


def test_a_decision_tells_what_every_candidate_would_have_cost() -> None:
    candidates = [candidate("a", overlap=500), candidate("b", pending=100)]
    decision = kv()(candidates, 1000)
    assert [cost.candidate for cost in decision.costs] == candidates
    assert [cost.total for cost in decision.costs] == [1000, 2100]
    assert decision.choice is candidates[0]


def test_ties_are_broken_at_random() -> None:
    policy = kv(seed=7)
    counts = Counter(chosen(policy, [candidate("a"), candidate("b"), candidate("c", pending=1)]) for _ in range(400))
    assert set(counts) == {"a", "b"}
    assert min(counts.values()) > 150
    assert chosen(kv(3), [candidate("a"), candidate("b")]) == chosen(kv(3), [candidate("a"), candidate("b")])


@pytest.mark.parametrize(
    ("pending", "worker"),
    [(0, "holder"), (1000, "holder"), (1799, "holder"), (1801, "idle"), (5000, "idle")],
)
def test_a_prefix_stays_together_until_the_queue_costs_more_than_the_prefill(pending: int, worker: str) -> None:
    """900 tokens saved, charged twice, are worth a queue of 1800."""
    assert chosen(kv(), [candidate("holder", overlap=900, pending=pending), candidate("idle")]) == worker


def test_requests_in_flight_make_uncached_tokens_dearer_and_cached_ones_not() -> None:
    busy = {"requests": 10}
    assert chosen(kv(), [candidate("busy", **busy), candidate("idle")]) == "idle"
    assert chosen(kv(), [candidate("busy", overlap=1000, **busy), candidate("idle")]) == "busy"


def test_the_context_of_others_counts() -> None:
    assert chosen(kv(), [candidate("full", context=10_000), candidate("empty")]) == "empty"


amounts = st.integers(0, 100_000)
candidates_lists = st.lists(
    st.builds(candidate, st.sampled_from("abcdef"), amounts, st.integers(0, 500), amounts, amounts),
    min_size=1,
    max_size=8,
)
weights = st.builds(KvWeights, *[st.floats(0, 10)] * 3)


@given(amounts, amounts, st.integers(0, 500), amounts, amounts, st.integers(1, 100_000), weights)
def test_holding_more_never_costs_more(
    overlap: int, more: int, requests: int, pending: int, context: int, tokens: int, weights: KvWeights
) -> None:
    less_held = kv_cost(candidate("w", overlap, requests, pending, context), tokens, weights)
    more_held = kv_cost(candidate("w", overlap + more, requests, pending, context), tokens, weights)
    assert sum(more_held.values()) <= sum(less_held.values())


@given(amounts, st.integers(0, 500), amounts, amounts, st.integers(1, 100_000), weights)
def test_more_to_do_never_costs_less(
    overlap: int, requests: int, pending: int, context: int, tokens: int, weights: KvWeights
) -> None:
    now = sum(kv_cost(candidate("w", overlap, requests, pending, context), tokens, weights).values())
    for busier in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        more = [amount + extra for amount, extra in zip((requests, pending, context), busier, strict=True)]
        assert sum(kv_cost(candidate("w", overlap, *more), tokens, weights).values()) >= now


@given(candidates_lists, st.integers(1, 100_000), st.integers())
def test_the_choice_is_the_cheapest_and_depends_on_nothing_else(
    candidates: list[Candidate], tokens: int, seed: int
) -> None:
    decision = kv(seed)(candidates, tokens)
    totals = {id(cost.candidate): cost.total for cost in decision.costs}
    assert totals[id(decision.choice)] == min(totals.values())
    assert kv(seed)(candidates, tokens) == decision


def test_round_robin_takes_turns() -> None:
    policy = round_robin()
    candidates = [candidate("a", overlap=1000), candidate("b", requests=9), candidate("c")]
    decisions = [policy(candidates, 1000) for _ in range(6)]
    assert [decision.choice.target.worker for decision in decisions] == ["a", "b", "c"] * 2
    for decision in decisions:
        assert min(decision.costs, key=lambda cost: cost.total).candidate is decision.choice


def test_round_robin_goes_on_when_a_candidate_is_lost() -> None:
    policy = round_robin()
    chosen(policy, [candidate("a"), candidate("b"), candidate("c")])
    assert {chosen(policy, [candidate("a"), candidate("b")]) for _ in range(2)} == {"a", "b"}


def test_least_loaded_counts_requests_only() -> None:
    policy = least_loaded(Random(0))
    assert chosen(policy, [candidate("a", overlap=1000, requests=2), candidate("b", requests=1, pending=9999)]) == "b"
    assert {chosen(policy, [candidate("a"), candidate("b")]) for _ in range(50)} == {"a", "b"}
