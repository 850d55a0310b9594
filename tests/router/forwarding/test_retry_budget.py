"""The number of allowed retries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock

from router.forwarding.retries import WINDOW, RetryBudget


def taken(budget: RetryBudget, tries: int) -> int:
    return sum(budget.take() for _ in range(tries))


@pytest.mark.parametrize(("minimum", "requests", "retries"), [(3, 0, 3), (0, 0, 0), (3, 100, 23), (1, 50, 11)])
def test_retries_are_a_minimum_and_a_share_of_recent_requests(
    clock: Clock, minimum: int, requests: int, retries: int
) -> None:
    budget = RetryBudget(0.2, minimum, clock)
    for _ in range(requests):
        budget.request()
    assert taken(budget, 100) == retries
    clock.now += WINDOW
    assert taken(budget, 100) == minimum, "old requests are forgotten"


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
