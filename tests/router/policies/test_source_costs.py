"""Sources beside a target's own cache: their price in tokens and in seconds."""

from __future__ import annotations

from array import array
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import Target
from router.policies import Candidate, KvWeights, Policy, Request, kv_aware
from router.policies.kv_aware import kv_cost
from router.policies.rates import Rates
from router.policies.records import Source
from router.policies.shared_tokens import SharedTokens

TOKENS = 10_000
PRICES = st.floats(0, 1)


def policy() -> Policy:
    return kv_aware(KvWeights(), Random(1))


def candidate(name: str, overlap: int, source: Source | None = None, rates: Rates | None = None) -> Candidate:
    load: dict[str, Any] = {"requests": 5, "pending": 300, "context": 4000, "context_token": 0.1}
    return Candidate(Target(name, 0, "m"), overlap, **load, eviction=0.25, backlog=0.1, rates=rates, source=source)


def total(candidate: Candidate) -> float:
    return sum(policy()([candidate], Request(TOKENS, 100.0)).costs[0].terms.values())


@pytest.mark.parametrize("rates", [None, Rates(attention=0.0)])
@given(price=PRICES, waiting=st.integers(0, 1000))
def test_loaded_token_costs_its_share_of_a_computed_one(rates: Rates | None, price: float, waiting: int) -> None:
    second = 1.0 if rates is None else rates.token
    source = Source("pool", 8000, price, waiting, second)
    own, none = (total(candidate("w", overlap, rates=rates)) for overlap in (9000, 1000))
    loading = total(candidate("w", 1000, source, rates))
    harm, eviction = second * (1 + 1), second * 10 * 0.25
    assert loading == pytest.approx(own + price * (8000 + waiting) * harm + 8000 * eviction, rel=0.01)
    if rates is None:
        assert own <= loading <= none + price * waiting * harm + 1e-6


def test_source_lowers_the_cost_of_a_target_that_has_nothing_and_raises_none_above_the_holder() -> None:
    holder, nothing = candidate("holder", 9000), candidate("nothing", 0)
    loads = candidate("loads", 0, Source("pool", 9000, 0.3))
    assert total(holder) < total(loads) < total(nothing)


def test_start_of_a_load_is_a_part_of_its_price() -> None:
    source = Source("pool", 1000, 0.1, 500, computed_seconds=4e-5, start=200.0)
    assert (source.duration, source.own_load, source.load, source.saved) == (350, 300, 350, 650)
    assert source.load_seconds == pytest.approx(350 * 4e-5)


def test_load_slower_than_computing_costs_as_much_as_computing_and_the_wait() -> None:
    short = Source("pool", 100, 0.1, computed_seconds=4e-5, start=200.0)
    assert (short.load, short.saved) == (100, 0)
    assert short.load_seconds == pytest.approx(210 * 4e-5)
    slow = Source("pool", 1000, 2.0, 300)
    assert (slow.own_load, slow.load, slow.saved) == (1000, 1600, -600)


@pytest.mark.parametrize("rates", [None, Rates(attention=0.0)])
def test_prefill_delays_each_load_in_flight_by_its_time(rates: Rates | None) -> None:
    source = Source("pool", 4000, 0.5, computed_seconds=1.0 if rates is None else rates.token)
    free, loading = candidate("w", 1000, source, rates), candidate("w", 1000, source, rates)
    loading.loads = 3
    before, after = (policy()([each], Request(TOKENS)).costs[0].terms for each in (free, loading))
    assert after["interference"] == pytest.approx(before["interference"] + 3 * before["prefill"])
    assert after["load"] == before["load"], "a load delays nothing"


def test_prompt_avoids_the_target_whose_loads_it_would_delay() -> None:
    loading, free = candidate("loading", 0), candidate("free", 0)
    loading.loads, loading.context = 1, 0
    assert policy()([loading, free], Request(TOKENS)).chosen is free
    assert policy()([loading, candidate("other", 0)], Request(1)).chosen is loading


def test_terms_show_the_load_apart() -> None:
    terms = policy()([candidate("w", 1000, Source("pool", 8000, 0.5, 2000))], Request(TOKENS)).costs[0].terms
    assert terms["prefill"] == 1000
    assert terms["load"] == pytest.approx(0.5 * 10_000 * (1 + 1))  # whatever the answers there
    assert terms["eviction"] == pytest.approx((1000 + 8000) * 10 * 0.25)  # loaded tokens take room, too


@pytest.mark.parametrize("rates", [None, Rates(attention=0.0)])
def test_other_sessions_pay_their_share_of_a_load_where_the_copy_finds_room(rates: Rates | None) -> None:
    second = 1.0 if rates is None else rates.token
    loads = candidate("w", 1000, Source("pool", 8000, 0.5, computed_seconds=second), rates)
    shared = Request(TOKENS, shared=SharedTokens(array("I", [9000]), array("d", [0.75])))
    alone = policy()([loads], Request(TOKENS)).costs[0].terms["load"]
    assert policy()([loads], shared).costs[0].terms["load"] == alone  # the copy would evict other blocks
    loads.eviction = 0.0
    divided = policy()([loads], shared).costs[0].terms["load"]
    assert divided == pytest.approx(policy()([loads], Request(TOKENS)).costs[0].terms["load"] / 4)


def test_other_sessions_pay_no_part_of_the_wait_for_other_loads() -> None:
    loads = candidate("w", 1000, Source("pool", 8000, 0.5, 600))
    loads.eviction = 0.0
    shared = Request(TOKENS, shared=SharedTokens(array("I", [9000]), array("d", [0.75])))
    assert policy()([loads], shared).costs[0].terms["load"] == pytest.approx((1000 + 300) * (1 + 1))


@given(price=PRICES, waiting=st.integers(0, 1000), loads=st.integers(0, 5), share=PRICES, full=st.booleans())
def test_costs_that_are_compared_are_the_sums_of_the_shown_terms(
    price: float, waiting: int, loads: int, share: float, full: bool
) -> None:
    asked = Request(TOKENS, shared=SharedTokens(array("I", [9500]), array("d", [share])))
    each = candidate("w", 1000, Source("pool", 8000, price, waiting, start=100.0))
    each.loads, each.eviction = loads, 0.25 if full else 0.0
    shown = sum(kv_cost(each, asked, KvWeights()).values())
    one_token = 1 + 1 + 0.25 * 5 + loads
    assert kv_aware(KvWeights(), Random(1)).cost_of(each, asked) == pytest.approx(shown, abs=one_token)


def test_parts_of_a_prompt_are_divided_into_loaded_and_computed_tokens() -> None:
    shared = SharedTokens(array("I", [200, 700]), array("d", [0.9, 0.5]))
    assert shared.after(500) == pytest.approx(200 * 0.5)
    assert shared.part_of_load(100, 500) == pytest.approx((100 * 0.9 + 300 * 0.5) / 400)
    assert shared.part_of_load(100, 100) == 0.0
