"""The health of a worker: outcomes of its requests, expected times to the first byte, and stalls."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock

from router.fleet.circuit import CircuitLimits
from router.fleet.health import FirstByte, Health, Outcome, expected_seconds
from router.fleet.stall_detector import StallLimits, Usual, stalled

STALL = StallLimits(silence=1.0, factor=3.0)


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(CircuitLimits(), clock)


def test_only_failures_in_a_row_open_the_circuit(health: Health) -> None:
    for outcome in (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.FAILED, Outcome.SUCCEEDED, Outcome.FAILED):
        health.begin(1).end(outcome)
        assert health.circuit.closed
    for _ in range(2):
        health.begin(1).end(Outcome.FAILED)
    assert not health.circuit.closed
    health.begin(1).end(Outcome.SUCCEEDED)
    assert health.circuit.closed


def test_waiting_requests_are_moved_once(health: Health) -> None:
    called: list[int] = []
    for number in range(3):
        health.begin(1).give_up = lambda number=number: called.append(number) is None
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


def usual(seconds: float) -> Usual:
    return Usual([FirstByte(100, True, seconds, 0.0)] * 10)


def test_first_byte_later_than_factor_times_expected_is_a_stall(health: Health, clock: Clock) -> None:
    health.begin(100).give_up = lambda: True
    clock.now += 2.9
    assert stalled(health, STALL, usual(1.0), 2.9, 0.0) is None
    clock.now += 0.2
    assert stalled(health, STALL, usual(1.0), 3.1, 0.0) == "no first byte for 3.1 s, expected within 1.00 s"


@pytest.mark.parametrize(
    ("work", "streamed", "movable", "silent", "is_stall"),
    [
        (100, True, True, 20, True),
        (1000, True, True, 20, False),  # more work takes longer
        (100, True, True, 0.5, False),  # a recent sign of life
        (100, False, True, 20, False),  # a whole answer takes longer than the beginning of a streamed one
        (100, True, False, 20, False),  # it cannot be moved
    ],
)
def test_late_first_byte_is_a_stall_unless_something_explains_it(
    health: Health, clock: Clock, work: int, streamed: bool, movable: bool, silent: float, is_stall: bool
) -> None:
    attempt = health.begin(work, streamed=streamed)
    if movable:
        attempt.give_up = lambda: True
    clock.now += 20
    assert (stalled(health, STALL, usual(1.0), silent, 0.0) is not None) is is_stall


def test_unanswered_scrape_is_a_stall_without_comparable_first_bytes(health: Health, clock: Clock) -> None:
    attempt = health.begin(100, streamed=False)
    clock.now += 1.1
    assert stalled(health, STALL, Usual([]), silent=1.1, unanswered=1.0) == "no sign of life for 1.0 s"
    attempt.end(Outcome.NEITHER)
    assert stalled(health, STALL, Usual([]), silent=1.1, unanswered=1.0) is None  # no request waits


@pytest.mark.parametrize(
    ("most_tokens", "longest_answer", "patience"),
    [
        (None, 100, 2460.6),  # any model may write 4,096 tokens
        (None, 10_000, 12_003.0),  # this one has written 10,000
        (1000, 10_000, 603.0),  # the client asked for 1,000
        (10, 10_000, 60.0),
    ],
)
def test_whole_answer_has_the_time_of_the_longest_plausible_output(
    health: Health, clock: Clock, most_tokens: int | None, longest_answer: int, patience: float
) -> None:
    earlier = health.begin(100, streamed=False)
    clock.now += 1.0
    earlier.heard()
    earlier.answered(longest_answer)
    earlier.end(Outcome.SUCCEEDED)
    attempt = health.begin(100, streamed=False)
    attempt.give_up, attempt.most_tokens = lambda: True, most_tokens
    begun = clock.now
    for seconds, late in ((0.99 * patience, False), (1.01 * patience, True)):
        clock.now = begun + seconds
        seen = Usual([FirstByte(100, False, 1.0, clock.now)], health.longest_answer)
        assert (stalled(health, STALL, seen, seconds, 0.0) is not None) is late


def test_full_worker_receives_one_request_for_each_end_and_each_first_byte(health: Health) -> None:
    first, second = health.begin(1, 0, one_of_many=True), health.begin(1, 1, one_of_many=True)
    health.close()
    assert health.full, "the limit of an engine counts over all ranks"
    first.heard()
    assert not health.full
    health.begin(1).end(Outcome.FULL)
    health.close()
    second.end(Outcome.NEITHER)
    assert not health.full
    health.begin(1)
    assert health.full


def test_invalid_request_has_no_place_that_its_end_could_free(health: Health) -> None:
    busy, invalid = health.begin(1), health.begin(1)
    health.close()
    invalid.end(Outcome.REFUSED)
    assert health.full
    busy.end(Outcome.SUCCEEDED)
    assert not health.full


def test_whole_answer_frees_one_place(health: Health) -> None:
    whole = health.begin(1, streamed=False)
    health.begin(1)
    health.close()
    whole.heard()
    whole.end(Outcome.SUCCEEDED)
    health.begin(1)
    assert health.full


def test_full_worker_without_requests_in_flight_receives_one_each_second(health: Health, clock: Clock) -> None:
    for _ in range(3):
        health.begin(1).end(Outcome.FULL)
        health.close()
        assert health.full
        clock.now += 1
        assert not health.full
    health.begin(1).end(Outcome.FULL)
    health.close()
    assert health.counts_as_full
    clock.now += 10
    assert not health.counts_as_full


def test_full_worker_stays_closed_while_its_requests_run(health: Health, clock: Clock) -> None:
    health.begin(1)
    health.close()
    clock.now += 1000
    assert health.full


def test_pause_lasts_its_seconds_whatever_ends(health: Health, clock: Clock) -> None:
    busy = health.begin(1)
    health.pause(30)
    busy.heard()
    busy.end(Outcome.SUCCEEDED)
    clock.now += 29
    assert health.full
    assert health.paused
    clock.now += 1
    assert not health.full
    health.begin(1)
    assert health.full, "one request finds out whether the pause was enough"


def test_full_worker_has_no_failure(health: Health) -> None:
    for _ in range(10):
        health.begin(1).end(Outcome.FULL)
    assert health.circuit.closed
    assert not health.results()
