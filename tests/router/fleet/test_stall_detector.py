"""Hung workers, by the times of their requests and by silence."""

from __future__ import annotations

import pytest
from manual_clock import Clock

from router.fleet.circuit import CircuitLimits
from router.fleet.health import FirstByte, Health, Outcome
from router.fleet.stall_detector import StallLimits, stalled

STALL = StallLimits(silence=1.0, factor=3.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(CircuitLimits(), clock)


def usual(seconds: float, work: int = 100, streamed: bool = True) -> list[FirstByte]:
    return [FirstByte(work, streamed, seconds, 0.0)] * 10


def test_first_byte_later_than_factor_times_expected_is_a_stall(health: Health, clock: Clock) -> None:
    health.begin(100).give_up = lambda: None
    clock.now += 2.9
    assert stalled(health, STALL, usual(1.0), 2.9, 0.0) is None
    clock.now += 0.2
    assert stalled(health, STALL, usual(1.0), 3.1, 0.0) == "no first byte for 3.1 s, expected within 1.00 s"


def test_more_work_extends_the_expected_time(health: Health, clock: Clock) -> None:
    health.begin(1000).give_up = lambda: None
    clock.now += 20
    assert stalled(health, STALL, usual(1.0, work=100), 20, 0.0) is None


def test_recent_sign_of_life_prevents_a_stall(health: Health, clock: Clock) -> None:
    health.begin(100).give_up = lambda: None
    clock.now += 30
    assert stalled(health, STALL, usual(0.1), silent=0.5, unanswered=0.0) is None


def test_unanswered_scrape_is_a_stall_without_comparable_first_bytes(health: Health, clock: Clock) -> None:
    attempt = health.begin(100, streamed=False)
    clock.now += 1.1
    assert stalled(health, STALL, [], silent=1.1, unanswered=1.0) == "no sign of life for 1.0 s"
    attempt.end(Outcome.NEITHER)
    assert stalled(health, STALL, [], silent=1.1, unanswered=1.0) is None  # no request waits


def test_late_first_byte_without_comparable_ones_is_no_stall(health: Health, clock: Clock) -> None:
    """A whole answer takes longer than the beginning of a streamed one."""
    health.begin(100, streamed=False).give_up = lambda: None
    clock.now += 60
    assert stalled(health, STALL, usual(0.1, streamed=True), 60, 0.0) is None


def test_late_request_that_cannot_be_moved_is_no_stall(health: Health, clock: Clock) -> None:
    health.begin(100)
    clock.now += 60
    assert stalled(health, STALL, usual(0.1), 60, 0.0) is None
