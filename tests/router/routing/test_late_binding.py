"""When a request is held, the order of held requests, and the share of time that a fleet spends on prefills."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer import Target
from router.load.target_load import ReservedLoad, TargetLoad
from router.policies import Candidate
from router.policies.records import Source
from router.routing.late_binding import NO_TIME_TO_SPARE, STEP_TOKENS, held_order, is_busy, is_sooner, should_hold
from router.routing.load_view import HORIZON, PrefillShare


@pytest.mark.parametrize(
    ("pending", "held"), [(0, False), (STEP_TOKENS, False), (STEP_TOKENS + 1, True), (10 * STEP_TOKENS, True)]
)
def test_request_is_held_while_its_target_has_more_prefill_than_a_step(pending: int, held: bool) -> None:
    assert should_hold(pending) is held


def test_short_prefills_are_first_without_starvation() -> None:
    long_one = held_order(arrival=10.0, prefill_seconds=2.0)
    assert held_order(10.0, 0.1) < long_one
    assert held_order(13.0, 0.1) < long_one
    assert held_order(14.0, 0.1) > long_one


@given(
    st.floats(0, 1e6), st.floats(0, 600), st.floats(2, 1e4), st.floats(1e-3, 1e6), st.floats(0, 600), st.floats(2, 1e4)
)
def test_no_request_is_overtaken_after_its_weighted_prefill(
    arrival: float, prefill: float, weight: float, after: float, later_prefill: float, later_weight: float
) -> None:
    waiting = held_order(arrival, prefill, weight)
    assert waiting < held_order(arrival + weight * prefill + after, later_prefill, later_weight)


class Load:
    """The load of a target at the test's time.

    A prefill of `steps` steps is running, and expected to last 10 seconds. Prefills of `waiting` steps wait.
    """

    def __init__(self, steps: float, *waiting: float, streamed: bool = True) -> None:
        self.now = 100.0
        self.load = TargetLoad(clock=lambda: self.now)
        for each in (steps, *waiting):
            ReservedLoad(self.load, int(each * STEP_TOKENS), 0, 10.0, streamed=streamed)

    def busy_after(self, seconds: float, *, crowded: bool = False, others: float = 0.0, weight: float = 1.0) -> bool:
        """Return whether requests are held `seconds` seconds after the prefill began. `others`: peers' steps."""
        self.now = 100.0 + seconds
        return is_busy(self.load, crowded, int(others * STEP_TOKENS), weight)


def test_remaining_time_of_a_running_prefill_counts_and_an_overdue_one_in_full() -> None:
    load = Load(4)
    assert [load.busy_after(seconds) for seconds in (0, 7, 8, 9.9)] == [True, True, False, False]
    assert [load.busy_after(seconds) for seconds in (10, 19.9)] == [False, False]
    assert [Load(4, 0.5).busy_after(seconds) for seconds in (8, 9.9)] == [True, True]  # at least a step is left
    assert not Load(0.5, 0.25).busy_after(0)
    assert [Load(4).busy_after(seconds) for seconds in (20, 1000)] == [True, True]


def test_held_requests_and_prefills_of_peers_count_and_unobserved_ones_do_not() -> None:
    assert Load(4).busy_after(9, crowded=True)
    assert not Load(0.5).busy_after(9, crowded=True)
    assert Load(4).busy_after(9, others=0.5)
    assert Load(0.5).busy_after(0, others=1)
    assert not Load(4, 4, streamed=False).busy_after(0)


def test_double_weight_allows_double_load() -> None:
    assert [Load(2.5).busy_after(0, weight=weight) for weight in (1.0, 2.0, 3.0)] == [True, True, False]
    assert [Load(4).busy_after(seconds, weight=2.0) for seconds in (4, 6)] == [True, False]


def candidate(pending: int, overlap: int) -> Candidate:
    return Candidate(Target("w", 0, "m"), overlap=overlap, pending=pending)


@pytest.mark.parametrize(
    ("pending", "prefilling", "goes"),
    [
        (5999, 0.0, True),
        (6000, 0.0, False),
        (999, NO_TIME_TO_SPARE / 2, True),
        (1000, NO_TIME_TO_SPARE / 2, False),
        (0, NO_TIME_TO_SPARE, False),
        (0, 1.0, False),
    ],
)
def test_busier_fleet_requires_earlier_answers_of_idle_targets(pending: int, prefilling: float, goes: bool) -> None:
    here = candidate(9000, overlap=5000)
    assert is_sooner(candidate(pending, overlap=2000), here, tokens=6000, prefilling=prefilling) is goes


def test_idle_target_that_loads_a_prefix_answers_sooner() -> None:
    here, there = candidate(100_000, overlap=20_000), candidate(0, overlap=0)
    assert not is_sooner(there, here, tokens=21_000, prefilling=0.0)
    for price, goes in ((0.2, True), (0.5, False)):
        there.source = Source("pool", 20_000, price)
        assert is_sooner(there, here, tokens=21_000, prefilling=0.0) is goes
    here.pending, here.overlap, here.source = 5000, 0, Source("pool", 20_000, 0.1)
    there.source = Source("pool", 20_000, 0.3)
    assert is_sooner(there, here, tokens=21_000, prefilling=0.0)  # 1000 + 6000 against 5000 + 1000 + 2000
    here.pending = 3000
    assert not is_sooner(there, here, tokens=21_000, prefilling=0.0)


def test_request_waits_for_a_long_prefix() -> None:
    here = candidate(100_000, overlap=20_000)
    for missing, goes in ((STEP_TOKENS, True), (STEP_TOKENS + 1, False)):
        assert is_sooner(candidate(0, overlap=20_000 - missing), here, tokens=21_000, prefilling=0.0) is goes


def test_until_something_is_known_all_are_taken_to_be_busy() -> None:
    share = PrefillShare()
    assert share.average == 1
    share.see(0.0, 5.0)
    assert share.average == 1
    share.see(0.0, 5.0 + HORIZON)
    assert share.average == pytest.approx(0.37, abs=0.01)


def test_share_follows_samples_and_decays() -> None:
    share = PrefillShare()
    for second in range(1, 600):
        share.see(second % 2, float(second))
    assert share.average == pytest.approx(0.5, abs=0.02)
    share.see(0.25, 600.0 + 20 * HORIZON)
    assert share.average == pytest.approx(0.25, abs=1e-6)


def test_first_prompts_do_not_make_a_fleet_count_as_busy() -> None:
    share = PrefillShare()
    assert share.observed == 0
    share.see(0.5, 1.0)
    share.see(0.5, 2.0)
    assert share.observed == pytest.approx(0.05, abs=0.01)  # one second of ten
    share.see(0.5, 61.0)
    assert share.observed == pytest.approx(0.5)


def test_earlier_time_is_ignored() -> None:
    share = PrefillShare()
    share.see(0.0, 100.0)
    share.see(0.0, 200.0)
    before = share.average
    share.see(1.0, 150.0)
    share.see(1.0, 200.0)
    assert share.average == before
