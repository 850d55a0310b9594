"""Hung workers, by what their requests tell."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock

from router.fleet.circuit import CircuitLimits
from router.fleet.health import (
    FirstByte,
    Health,
    Outcome,
    StallLimits,
    expected_seconds,
    stalled,
)
from router.fleet.worker import Worker, WorkerState, choosable
from router.settings import WorkerSettings

STALL = StallLimits(silence=1.0, factor=3.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(CircuitLimits(), clock)


def usual(seconds: float, work: int = 100, streamed: bool = True) -> list[FirstByte]:
    return [FirstByte(work, streamed, seconds, 0.0)] * 10


def answered(health: Health, clock: Clock, seconds: float, work: int = 100) -> None:
    attempt = health.begin(work)
    clock.now += seconds
    attempt.heard()
    attempt.end(Outcome.SUCCEEDED)


# Hanging


def test_a_first_byte_far_later_than_usual_is_a_stall(health: Health, clock: Clock) -> None:
    health.begin(100).give_up = lambda: None
    clock.now += 2.9
    assert stalled(health, STALL, usual(1.0), 2.9, 0.0) is None
    clock.now += 0.2
    assert stalled(health, STALL, usual(1.0), 3.1, 0.0) == "no first byte for 3.1 s, where 1.00 s are usual"


def test_more_work_may_take_longer(health: Health, clock: Clock) -> None:
    health.begin(1000).give_up = lambda: None
    clock.now += 20
    assert stalled(health, STALL, usual(1.0, work=100), 20, 0.0) is None


def test_a_sign_of_life_is_no_stall(health: Health, clock: Clock) -> None:
    health.begin(100).give_up = lambda: None
    clock.now += 30
    assert stalled(health, STALL, usual(0.1), silent=0.5, unanswered=0.0) is None


def test_a_worker_that_does_not_answer_at_all_is_a_stall_whatever_is_usual(health: Health, clock: Clock) -> None:
    attempt = health.begin(100, streamed=False)
    clock.now += 1.1
    assert stalled(health, STALL, [], silent=1.1, unanswered=1.0) == "no sign of life for 1.0 s"
    attempt.end(Outcome.NEITHER)
    assert stalled(health, STALL, [], silent=1.1, unanswered=1.0) is None  # nobody waits


def test_what_was_never_seen_is_not_judged(health: Health, clock: Clock) -> None:
    """A whole answer takes longer than the beginning of a streamed one."""
    health.begin(100, streamed=False).give_up = lambda: None
    clock.now += 60
    assert stalled(health, STALL, usual(0.1, streamed=True), 60, 0.0) is None


def test_a_request_that_cannot_go_elsewhere_is_no_reason(health: Health, clock: Clock) -> None:
    health.begin(100)
    clock.now += 60
    assert stalled(health, STALL, usual(0.1), 60, 0.0) is None


def test_requests_are_called_off_once(health: Health) -> None:
    called: list[int] = []
    for number in range(3):
        health.begin(1).give_up = lambda number=number: called.append(number)
    health.begin(1)
    assert health.give_up_waiting() == 3
    assert health.give_up_waiting() == 0
    assert called == [0, 1, 2]


@given(
    st.lists(st.tuples(st.integers(1, 10**6), st.floats(0.001, 100)), min_size=1, max_size=64), st.integers(1, 10**6)
)
def test_what_is_expected_never_falls_with_the_work(seen: list[tuple[int, float]], work: int) -> None:
    first_bytes = [FirstByte(done, True, seconds, 0.0) for done, seconds in seen]
    less, more = expected_seconds(first_bytes, work, True), expected_seconds(first_bytes, 2 * work, True)
    assert less is not None
    assert more is not None
    assert min(seconds for _, seconds in seen) <= less <= more


# Results


def test_failures_in_a_row_open_the_circuit_and_others_do_not(health: Health) -> None:
    for _ in range(10):
        health.begin(1).end(Outcome.NEITHER, "status 404")
    assert health.circuit.allows
    for _ in range(3):
        health.begin(1).end(Outcome.FAILED, "status 500")
    assert (health.circuit.allows, health.circuit.reason) == (False, "status 500")


def test_only_the_first_end_counts(health: Health) -> None:
    attempt = health.begin(1, dp_rank=2)
    assert health.in_flight() == Counter({2: 1})
    attempt.end(Outcome.SUCCEEDED)
    attempt.end(Outcome.FAILED)
    assert [result.failed for result in health.results()] == [False]
    assert health.in_flight() == Counter()


# Who is chosen


def worker(clock: Clock, warming: float | None = None) -> Worker:
    made = Worker(
        WorkerSettings.model_validate({"url": "http://w"}), health=Health(CircuitLimits(), clock), slow_start=10
    )
    made.problem = None
    made.warming_since = None if warming is None else clock.now - warming
    return made


@pytest.mark.parametrize(("seconds", "share"), [(0.0, 0.1), (2.0, 0.2), (5.0, 0.5), (10.0, 1.0), (60.0, 1.0)])
def test_the_share_of_a_new_worker_grows(clock: Clock, seconds: float, share: float) -> None:
    new, old = worker(clock, warming=seconds), worker(clock)
    assert new.share == pytest.approx(share)
    assert new.state is (WorkerState.WARMING if share < 1 else WorkerState.READY)
    random = Random(1)
    chosen = sum(new in choosable([new, old], random) for _ in range(1000))
    assert chosen == pytest.approx(1000 * share, abs=50)


def test_all_are_chosen_from_when_all_are_new(clock: Clock) -> None:
    new = [worker(clock, warming=0), worker(clock, warming=0)]
    assert all(choosable(new, Random(seed)) for seed in range(50))


def test_those_left_out_are_used_when_there_are_no_others(clock: Clock) -> None:
    good, bad = worker(clock), worker(clock)
    bad.health.circuit.open("it hangs")
    assert bad.state is WorkerState.EJECTED
    assert list(choosable([good, bad], Random())) == [good]
    assert list(choosable([bad], Random())) == [bad]


def test_a_worker_is_tried_again_only_once_it_answers(clock: Clock) -> None:
    good, bad = worker(clock), worker(clock)
    bad.metrics.asked()
    bad.health.circuit.open("it hangs")
    clock.now += 60
    assert bad.state is WorkerState.HALF_OPEN
    assert list(choosable([good, bad], Random())) == [good]
    bad.metrics.answered()
    assert list(choosable([good, bad], Random())) == [good, bad]
