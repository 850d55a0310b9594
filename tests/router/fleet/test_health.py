"""The health of a worker: outcomes of its requests, and expected times to the first byte."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock

from router.fleet.circuit import CircuitLimits
from router.fleet.health import (
    FirstByte,
    Health,
    Outcome,
    expected_seconds,
)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(CircuitLimits(), clock)


def test_waiting_requests_are_moved_once(health: Health) -> None:
    called: list[int] = []
    for number in range(3):
        health.begin(1).give_up = lambda number=number: called.append(number)
    health.begin(1)
    assert health.move_waiting() == 3
    assert health.move_waiting() == 0
    assert called == [0, 1, 2]


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.001, 100)), min_size=1, max_size=64), st.integers(1, 10**6)
)
def test_expected_time_never_falls_with_the_work(seen: list[tuple[int, float]], work: int) -> None:
    first_bytes = [FirstByte(done, True, seconds, 0.0) for done, seconds in seen]
    less, more = expected_seconds(first_bytes, work, True), expected_seconds(first_bytes, 2 * work, True)
    assert less is not None
    assert more is not None
    assert min(seconds for _, seconds in seen) <= less <= more


def test_failures_open_the_circuit_and_neutral_outcomes_do_not(health: Health) -> None:
    for _ in range(10):
        health.begin(1).end(Outcome.NEITHER, "status 404")
    assert health.circuit.allows
    for _ in range(3):
        health.begin(1).end(Outcome.FAILED, "status 500")
    assert (health.circuit.allows, health.circuit.reason) == (False, "status 500")


def test_second_end_of_a_request_is_ignored(health: Health) -> None:
    attempt = health.begin(1, dp_rank=2)
    assert health.in_flight() == Counter({2: 1})
    attempt.end(Outcome.SUCCEEDED)
    attempt.end(Outcome.FAILED)
    assert [result.failed for result in health.results()] == [False]
    assert health.in_flight() == Counter()
