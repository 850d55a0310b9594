"""The number of allowed retries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock

from router.forwarding.retries import WINDOW, RetryBudget


def taken(budget: RetryBudget, tries: int) -> int:
    return sum(budget.take() for _ in range(tries))


def test_minimum_of_retries_is_always_allowed() -> None:
    assert taken(RetryBudget(0.2, 3, Clock(0.5)), 10) == 3


def test_share_of_recent_requests_adds_retries() -> None:
    budget = RetryBudget(0.2, 3, Clock(0.5))
    for _ in range(100):
        budget.request()
    assert taken(budget, 100) == 23


def test_retry_budget_forgets_old_requests() -> None:
    clock = Clock(0.5)
    budget = RetryBudget(0.2, 1, clock)
    for _ in range(50):
        budget.request()
    assert taken(budget, 50) == 11
    clock.now += WINDOW
    assert taken(budget, 50) == 1


def test_no_retry_without_minimum_and_requests() -> None:
    assert not RetryBudget(0.2, 0, Clock(0.5)).take()


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 20), st.integers(0, 20)), max_size=60))
def test_retries_in_any_window_stay_within_the_budget(steps: list[tuple[float, int, int]]) -> None:
    clock = Clock(0.5)
    budget = RetryBudget(0.5, 2, clock)
    requests: list[int] = []
    retries: list[int] = []
    for seconds, came, tried in steps:
        clock.now += seconds
        for _ in range(came):
            budget.request()
        now = int(clock.now)
        requests += [now] * came
        retries += [now] * taken(budget, tried)
        recent_requests = sum(at > now - WINDOW for at in requests)
        recent_retries = sum(at > now - WINDOW for at in retries)
        if tried and retries and retries[-1] == now:
            assert recent_retries <= 2 + 0.5 * recent_requests
