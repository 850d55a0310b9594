"""The default policy: the chosen candidate, given the overlap and the load of each."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import Target
from router.policies import Candidate, KvWeights, Policy, Request, kv_aware, kv_cost
from router.policies.rates import Rates, prefill_seconds

WEIGHTS = KvWeights()


def candidate(name: str, overlap: int = 0, requests: int = 0, pending: int = 0, context: int = 0) -> Candidate:
    return Candidate(Target(name, 0, "m"), overlap, requests, pending, context)


def evicting(name: str, lost_share: float, overlap: int = 0) -> Candidate:
    return Candidate(Target(name, 0, "m"), overlap, eviction=lost_share / (1 - lost_share))


def chosen(policy: Policy, candidates: list[Candidate], tokens: int = 1000) -> str:
    return policy(candidates, Request(tokens)).chosen.target.worker


def kv(seed: int = 0) -> Policy:
    return kv_aware(WEIGHTS, Random(seed))


def test_terms_of_the_cost() -> None:
    busy = candidate("w", overlap=600, requests=5, pending=300, context=8000)
    busy.context_token, busy.memory = 0.1, 70.0
    assert kv_cost(busy, Request(1000), WEIGHTS) == {
        "pending": 300,
        "memory": 70,
        "transfer": 0,
        "prefill": 400,
        "interference": pytest.approx(400 * (1 + 0.25 * 5)),
        "eviction": 0,
        "context": pytest.approx(0.25 * 0.1 * 8000),
    }
    assert kv_cost(candidate("w", overlap=1000), Request(1000), WEIGHTS)["prefill"] == 1, (
        "a cached prompt computes one token"
    )


def test_decision_has_the_cost_of_every_candidate() -> None:
    candidates = [candidate("a", overlap=500), candidate("b", pending=100)]
    decision = kv()(candidates, Request(1000))
    assert [cost.candidate for cost in decision.costs] == candidates
    assert [cost.total for cost in decision.costs] == [1000, 2100]
    assert decision.chosen is candidates[0]


def test_room_in_an_emptier_cache_is_worth_a_part_of_computing() -> None:
    full, empty = Candidate(Target("full", 0, "m"), 100, fuller=0.8), candidate("empty")
    assert kv_cost(full, Request(1000), WEIGHTS)["eviction"] == pytest.approx(900 * 0.8)
    assert chosen(kv(), [full, empty]) == "empty", "900 tokens at 2.8 cost more than 1000 at 2"
    full.overlap = 400
    assert chosen(kv(), [full, empty]) == "full", "a session stays where its prefix lies"


@pytest.mark.parametrize(
    ("near", "pending"),
    [(0.0, (0, 0, 1)), (0.05, (0, 90, 110))],  # of 2000
    ids=["equal costs", "costs near the lowest"],
)
def test_ties_are_broken_at_random(near: float, pending: tuple[int, int, int]) -> None:
    policy = kv_aware(KvWeights(near=near), Random(7))
    candidates = [candidate(name, pending=tokens) for name, tokens in zip("abc", pending, strict=True)]
    counts = Counter(chosen(policy, candidates) for _ in range(400))
    assert set(counts) == {"a", "b"}
    assert min(counts.values()) > 150
    assert chosen(kv(3), [candidate("a"), candidate("b")]) == chosen(kv(3), [candidate("a"), candidate("b")])


@pytest.mark.parametrize(
    ("pending", "worker"), [(0, "holder"), (1000, "holder"), (1799, "holder"), (1801, "idle"), (5000, "idle")]
)
def test_prefix_moves_once_queueing_costs_more_than_prefill(pending: int, worker: str) -> None:
    """900 tokens saved, charged twice, are worth a queue of 1800."""
    assert chosen(kv(), [candidate("holder", overlap=900, pending=pending), candidate("idle")]) == worker


def test_requests_in_flight_raise_only_the_cost_of_uncached_tokens() -> None:
    busy = {"requests": 10}
    assert chosen(kv(), [candidate("busy", **busy), candidate("idle")]) == "idle"
    assert chosen(kv(), [candidate("busy", overlap=1000, **busy), candidate("idle")]) == "busy"


def test_where_evictions_are_asked_for_again_a_prefix_stays_together_whatever_the_queue() -> None:
    """A block in two that is evicted is wanted back: 900 tokens saved are worth 12 times as many in the queue."""
    idle = evicting("idle", 0.5)
    assert chosen(kv(), [candidate("holder", overlap=900, pending=10_700), idle]) == "holder"
    assert chosen(kv(), [candidate("holder", overlap=900, pending=11_900), idle]) == "idle"
    assert kv_cost(idle, Request(1000), WEIGHTS)["eviction"] == 10 * 1000


def test_worker_without_evictions_or_context_is_preferred() -> None:
    assert chosen(kv(), [evicting("full", 0.3), candidate("free", pending=1000)]) == "free"
    full = candidate("full", context=10_000)
    full.context_token = 0.1
    assert chosen(kv(), [full, candidate("empty")]) == "empty"


def test_cached_tokens_count_whole_and_cost_their_loading() -> None:
    on_disk = Candidate(Target("w", 0, "m"), overlap=900, cpu=200, disk=600)
    terms = kv_cost(on_disk, Request(1000), WEIGHTS)
    assert (terms["prefill"], terms["transfer"]) == (100, pytest.approx(0.1 * 200 + 0.5 * 600))
    in_memory = candidate("w", overlap=900)
    assert chosen(kv(), [on_disk, in_memory]) == "w"
    assert kv()([on_disk, in_memory], Request(1000)).chosen is in_memory
    assert kv()([on_disk, candidate("none")], Request(1000)).chosen is on_disk


FAST, SLOW = Rates(token=2e-5), Rates(token=8e-5)


def with_rates(name: str, rates: Rates | None, **load: int) -> Candidate:
    return Candidate(Target(name, 0, "m"), rates=rates, **load)


def test_seconds_count_among_unlike_workers_whose_rates_are_all_known() -> None:
    fast, slow = with_rates("fast", FAST), with_rates("slow", SLOW, overlap=500)
    assert chosen(kv(), [with_rates("fast", None), with_rates("slow", None, overlap=500)]) == "slow"
    assert chosen(kv(), [fast, slow]) == "fast"
    assert chosen(kv(), [with_rates("slow", SLOW, overlap=900), fast]) == "slow"
    terms = kv()([with_rates("fast", FAST), candidate("w")], Request(1000)).costs[0].terms
    assert terms["prefill"] == 1000


def test_terms_in_seconds() -> None:
    rates = Rates(step=0.01, token=1e-4, attention=1e-8, context_token=1e-7)
    c = Candidate(Target("w", 0, "m"), 1000, requests=4, context=20_000, backlog=0.7, eviction=0.25, rates=rates)
    prefill = 1e-4 * 9000 + 1e-8 * 9000 * 5500 + 2 * (0.01 + 1e-7 * 20_000 + 1e-4 * 4)
    assert prefill_seconds(rates, 10_000, 1000, 4, 20_000) == pytest.approx(prefill)
    decode = 300 * 0.4 * ((1e-4 * 4 + 1e-7 * 20_000) + 4 * (1e-4 + 1e-7 * 10_000))
    assert kv()([c], Request(10_000, 300)).costs[0].terms == {
        "pending": 0.7,
        "memory": 0,
        "prefill": pytest.approx(prefill),
        "interference": pytest.approx(prefill * (1 + 0.03 * 4)),
        "eviction": pytest.approx(prefill * 10 * 0.25),
        "decode": pytest.approx(decode),
    }


amounts = st.integers(0, 100_000)
candidates_lists = st.lists(
    st.builds(
        Candidate,
        st.builds(Target, st.sampled_from("abcdef"), st.just(0), st.just("m")),
        amounts,
        st.integers(0, 500),
        amounts,
        amounts,
        cpu=amounts,
        disk=amounts,
        eviction=st.floats(0, 12),
    ),
    min_size=1,
    max_size=8,
)
weights = st.builds(KvWeights, *[st.floats(0, 10)] * 5)


@given(amounts, amounts, st.integers(0, 500), amounts, amounts, st.integers(1, 100_000), weights)
def test_holding_more_never_costs_more(
    overlap: int, more: int, requests: int, pending: int, context: int, tokens: int, weights: KvWeights
) -> None:
    less_held = kv_cost(candidate("w", overlap, requests, pending, context), Request(tokens), weights)
    more_held = kv_cost(candidate("w", overlap + more, requests, pending, context), Request(tokens), weights)
    assert sum(more_held.values()) <= sum(less_held.values())


@given(amounts, st.integers(0, 500), amounts, amounts, st.integers(1, 100_000), weights)
def test_more_to_do_never_costs_less(
    overlap: int, requests: int, pending: int, context: int, tokens: int, weights: KvWeights
) -> None:
    now = sum(kv_cost(candidate("w", overlap, requests, pending, context), Request(tokens), weights).values())
    for busier in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        more = [amount + extra for amount, extra in zip((requests, pending, context), busier, strict=True)]
        assert sum(kv_cost(candidate("w", overlap, *more), Request(tokens), weights).values()) >= now


@given(candidates_lists, st.integers(1, 100_000), weights)
def test_cost_is_the_sum_of_its_terms(candidates: list[Candidate], tokens: int, weights: KvWeights) -> None:
    policy = kv_aware(weights, Random(1))
    for candidate in candidates:
        fixed, per_token, _ = policy.line(candidate)
        cost = policy.cost(fixed, per_token, tokens, candidate.overlap, candidate.cpu, candidate.disk)
        assert cost == pytest.approx(sum(policy.terms(candidate, Request(tokens)).values()))


@given(candidates_lists, st.integers(1, 100_000), st.integers())
def test_choice_is_the_cheapest_candidate(candidates: list[Candidate], tokens: int, seed: int) -> None:
    decision = kv(seed)(candidates, Request(tokens))
    totals = {id(cost.candidate): cost.total for cost in decision.costs}
    assert totals[id(decision.chosen)] == pytest.approx(min(totals.values()))
    assert kv(seed)(candidates, Request(tokens)).chosen is decision.chosen
