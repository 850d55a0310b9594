"""When refused requests may come again."""

from __future__ import annotations

import pytest

from router.admission.refusals import Refusals
from router.admission.ticket import Ticket


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def retry_after(refusals: Refusals, priority: int, ahead: int) -> int:
    error = refusals.too_many("queue_timeout", "m", Ticket(priority), ahead, ahead)
    assert error.retry_after is not None
    return error.retry_after


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def refusals(clock: Clock) -> Refusals:
    """Return refusals after 20 seconds with 1 place a second for priority -1 and 4 for priority 0."""
    refusals = Refusals(30.0, clock)
    for _ in range(20):
        for priority in (-1, 0, 0, 0, 0):
            refusals.rate.count(priority)
        clock.now += 1
    return refusals


def test_retry_after_is_the_place_over_the_rate_of_places_of_this_or_a_lower_priority(refusals: Refusals) -> None:
    assert retry_after(refusals, 0, ahead=79) == 20
    assert retry_after(refusals, -1, ahead=49) == 10  # it may have all places
    assert retry_after(refusals, 0, ahead=1000) == 60


def test_priority_without_places_waits_longest(refusals: Refusals) -> None:
    assert retry_after(refusals, 1, ahead=0) == 60


def test_places_of_the_past_do_not_count(refusals: Refusals, clock: Clock) -> None:
    clock.now += 60
    assert retry_after(refusals, 0, ahead=79) == 30  # nothing was placed: as long as a request may wait
    refusals.rate.count(0)
    clock.now += 1
    assert retry_after(refusals, 0, ahead=1) == 2
