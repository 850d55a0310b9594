"""The price of evictions, by the share of evicted blocks that are requested again."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock

from indexer import Target
from router.prediction.learned import HORIZON, EvictionPressure

CHUNK, STRIDE = 16, 16
UNIT = CHUNK * STRIDE
A, B = Target("a", 0, "m"), Target("b", 0, "m")
PROMPT = array("Q", range(1000, 1000 + 100 * STRIDE))  # of 100 units
TOKENS = len(PROMPT) * CHUNK


@pytest.fixture
def pressure(clock: Clock) -> EvictionPressure:
    pressure = EvictionPressure(CHUNK, STRIDE, clock=clock)
    pressure.removed({A: 0, B: 0})
    return pressure


def test_eviction_of_unrequested_blocks_costs_nothing(pressure: EvictionPressure) -> None:
    pressure.routed(PROMPT, 0)
    pressure.removed({A: TOKENS, B: 0})
    assert pressure.price() == 0


def test_blocks_still_cached_are_not_counted_as_lost(pressure: EvictionPressure) -> None:
    pressure.routed(PROMPT, 0)
    pressure.removed({A: 10 * TOKENS, B: 0})
    pressure.routed(PROMPT, TOKENS)
    assert pressure.price() == 0


def test_price_is_the_chance_of_a_repeated_request(pressure: EvictionPressure) -> None:
    pressure.routed(PROMPT, 0)
    pressure.removed({A: 4 * TOKENS, B: 0})
    pressure.routed(PROMPT, 0)
    assert pressure.price() == pytest.approx(0.25 / 0.75)
    pressure.routed(PROMPT, TOKENS // 2)
    assert pressure.price() == pytest.approx(0.375 / 0.625)


def test_pooled_blocks_are_not_lost_and_cost_their_load(pressure: EvictionPressure) -> None:
    pressure.routed(PROMPT, 0)
    pressure.removed({A: 4 * TOKENS, B: 0})
    pressure.routed(PROMPT, TOKENS // 2, reached=TOKENS, price=0.2)
    assert pressure.price() == pytest.approx(0.025 / 0.975)
    pressure.routed(PROMPT, 0, reached=TOKENS // 2, price=0.2)  # the other half is lost
    assert pressure.price() == pytest.approx(0.175 / 0.825)


def test_loads_of_new_prompts_cost_nothing(pressure: EvictionPressure) -> None:
    pressure.removed({A: 4 * TOKENS, B: 0})
    pressure.routed(PROMPT, 0, reached=TOKENS, price=0.2)
    assert pressure.price() == 0


def test_few_evictions_barely_change_the_price(pressure: EvictionPressure) -> None:
    pressure.routed(PROMPT[:STRIDE], 0)
    pressure.removed({A: UNIT, B: 0})
    pressure.routed(PROMPT[:STRIDE], 0)
    assert pressure.price() == pytest.approx(0.01, rel=0.05)


def test_old_losses_fade(pressure: EvictionPressure, clock: Clock) -> None:
    pressure.routed(PROMPT, 0)
    pressure.removed({A: 2 * TOKENS, B: 0})
    pressure.routed(PROMPT, 0)
    before = pressure.price()
    clock.now += 10 * HORIZON
    assert pressure.price() < before / 100


def test_only_recent_evictions_make_a_target_full(pressure: EvictionPressure, clock: Clock) -> None:
    assert not pressure.full(A)
    pressure.removed({A: 100, B: 0})
    assert pressure.full(A)
    assert not pressure.full(B)
    clock.now += HORIZON
    assert not pressure.full(A)


def test_evictions_have_no_price_without_counters(clock: Clock) -> None:
    pressure = EvictionPressure(CHUNK, STRIDE, clock=clock)
    pressure.routed(PROMPT, 0)
    pressure.routed(PROMPT, 0)
    assert pressure.price() == 0


def test_counter_reset_is_no_eviction_and_a_target_without_counters_evicts(pressure: EvictionPressure) -> None:
    pressure.removed({A: 5000})
    pressure.removed({A: 10, B: 70})
    assert not pressure.full(B)
    assert pressure.full(Target("silent", 0, "m"))


hash_lists = st.lists(st.integers(0, 40), max_size=60)


@given(st.lists(st.tuples(hash_lists, st.integers(0, 5000)), max_size=20), st.lists(st.integers(0, 10**6), max_size=5))
def test_price_and_memory_are_bounded(prompts: list[tuple[list[int], int]], removed: list[int]) -> None:
    pressure = EvictionPressure(CHUNK, stride=2, remembered=8, clock=Clock())
    for count in removed:
        pressure.removed({A: count})
    for hashes, held in prompts:
        pressure.routed(array("Q", hashes), held)
        assert len(pressure) <= 8
        assert 0 <= pressure.price() <= 0.92 / 0.08 + 1e-9
