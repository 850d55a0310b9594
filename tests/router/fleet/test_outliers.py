"""Outliers by the recent requests of workers."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st
from manual_clock import Clock

from router.fleet.circuit import CircuitLimits, CircuitState
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.health import Health, Outcome, expected_seconds
from router.fleet.stall_detector import Alike, OutlierLimits, Recent, StallDetector
from router.fleet.worker import Worker
from router.settings import FleetSettings, WorkerSettings

LIMITS = OutlierLimits()


class CountingClock(Clock):
    """A manual clock that counts its calls."""

    calls = 0

    def __call__(self) -> float:
        self.calls += 1
        return super().__call__()


def answered(health: Health, clock: Clock, seconds: float, work: int = 100) -> None:
    begun = clock.now
    attempt = health.begin(work)
    clock.now += seconds
    attempt.heard()
    attempt.end(Outcome.SUCCEEDED)
    clock.now = begun


def reasons(workers: list[Health]) -> list[str | None]:
    """Return why each of several workers with the same models is an outlier."""
    recent = [Recent(worker, LIMITS) for worker in workers]
    alike = Alike(recent, LIMITS)
    return [alike.outlier(worker) for worker in recent]


@pytest.mark.parametrize(
    ("failing", "reason"),
    [(1, "50% of its requests fail, 0% elsewhere"), (4, None)],
    ids=["one fails", "all fail alike"],
)
def test_worker_with_a_high_share_of_failures_is_an_outlier(clock: Clock, failing: int, reason: str | None) -> None:
    workers = [Health(CircuitLimits(), clock) for _ in range(4)]
    for number in range(20):
        for place, worker in enumerate(workers):
            worker.begin(1).end(Outcome.FAILED if place < failing and number % 2 else Outcome.SUCCEEDED)
    assert reasons(workers) == [reason, None, None, None]


@pytest.mark.parametrize(
    ("seconds", "work", "is_outlier"),
    [
        (2.0, 100, True),
        (0.55, 100, False),  # 5.5 times as long, and 0.45 s longer
        (0.65, 100, True),
        (1.5, 400, False),  # 3.75 times as long as usual for its work, and 1.1 s longer
        (2.1, 400, True),
        (0.3, 100, False),
        (2.0, 2000, False),
    ],
)
def test_worker_with_late_first_bytes_is_an_outlier(clock: Clock, seconds: float, work: int, is_outlier: bool) -> None:
    workers = [Health(CircuitLimits(), clock) for _ in range(3)]
    for _ in range(12):
        answered(workers[0], clock, seconds, work)
        answered(workers[1], clock, 0.1)
        answered(workers[2], clock, 0.1)
    assert [reason is not None for reason in reasons(workers)] == [is_outlier, False, False]


def test_500_invalid_requests_of_one_client_eject_no_worker(clock: Clock) -> None:
    workers = [Health(CircuitLimits(), clock) for _ in range(2)]
    for number in range(500):
        for worker in workers:
            refused = worker.begin(100)
            refused.heard()
            refused.end(Outcome.REFUSED, "status 400")
        if number % 50 == 0:
            answered(workers[0], clock, 1.0)
        clock.now += 0.1
        assert reasons(workers) == [None, None]
        assert all(worker.circuit.allows for worker in workers)
    assert [len(worker.results()) for worker in workers] == [10, 0]


def test_worker_is_compared_with_the_only_other_worker_that_answered(clock: Clock) -> None:
    workers = [Health(CircuitLimits(), clock) for _ in range(3)]
    for _ in range(12):
        answered(workers[0], clock, 2.0)
        answered(workers[1], clock, 0.1)
    assert reasons(workers) == ["first bytes take 2.0 s, 0.1 s elsewhere", None, None]


def test_worker_with_few_failures_is_no_outlier(clock: Clock) -> None:
    workers = [Health(CircuitLimits(failures=100), clock) for _ in range(3)]
    for _ in range(9):
        workers[0].begin(1).end(Outcome.FAILED)
        workers[1].begin(1).end(Outcome.SUCCEEDED)
    assert reasons(workers) == [None] * 3


@pytest.mark.parametrize(("late", "usual", "is_outlier"), [(10, 5, True), (9, 5, False), (10, 4, False)])
def test_late_worker_needs_enough_first_bytes_here_and_elsewhere(
    clock: Clock, late: int, usual: int, is_outlier: bool
) -> None:
    workers = [Health(CircuitLimits(), clock) for _ in range(3)]
    for seconds, count, worker in ((9.0, late, workers[0]), (0.1, usual, workers[1]), (0.1, usual, workers[2])):
        for _ in range(count):
            answered(worker, clock, seconds)
    assert [reason is not None for reason in reasons(workers)] == [is_outlier, False, False]


seen = st.tuples(st.sampled_from([0.1, 0.2, 0.4, 0.7, 1.5, 4.0, 9.0]), st.sampled_from([1, 100, 150, 1000, 5000]))


@given(st.lists(st.lists(seen, min_size=11, max_size=11), min_size=3, max_size=6))
def test_late_worker_is_late_against_each_of_its_requests(of_workers: list[list[tuple[float, int]]]) -> None:
    """The comparison of medians agrees with a comparison of every single request."""
    clock = Clock()
    workers = [Health(CircuitLimits(), clock) for _ in of_workers]
    for worker, requests in zip(workers, of_workers, strict=True):
        for seconds, work in requests:
            answered(worker, clock, seconds, work)
    found = reasons(workers)
    for worker, reason in zip(workers, found, strict=True):
        theirs = [first for other in workers if other is not worker for first in other.first_bytes()]
        mine = worker.first_bytes()
        seconds = median(first.seconds for first in mine)
        usual = median(expected_seconds(theirs, first.work, True) for first in mine)
        is_late = seconds > usual + LIMITS.seconds and seconds > LIMITS.factor * usual
        assert (reason is not None) == is_late


def fleet(workers: int, clock: Clock, serves: Callable[[int], str]) -> list[Worker]:
    """Return workers with the maximum number of results, and one request that has just begun."""
    made = []
    for number in range(workers):
        worker = Worker(WorkerSettings(url=f"http://w{number}"), health=Health(CircuitLimits(), clock))
        model = serves(number)
        worker.describe(WorkerDescription(Engine.VLLM, {model: ServedModel(model, model)}))
        worker.problem = None
        for _ in range(64):
            answered(worker.health, clock, 0.6)
        worker.health.begin(100)
        made.append(worker)
    return made


@pytest.fixture
def judge() -> StallDetector:
    return StallDetector(FleetSettings(), None)  # type: ignore[arg-type]  # no test reads events


def test_workers_are_compared_only_with_workers_of_the_same_models(clock: Clock, judge: StallDetector) -> None:
    workers = fleet(6, clock, lambda number: "ab"[number % 2])
    for _ in range(64):
        answered(workers[0].health, clock, 20.0)
        for slow in workers[1::2]:
            answered(slow.health, clock, 20.0)
    judge.eject_outliers(workers)
    opened = [worker.health.circuit.state is not CircuitState.CLOSED for worker in workers]
    assert opened == [True] + [False] * 5


def test_search_for_outliers_reads_each_worker_a_few_times(judge: StallDetector) -> None:
    clock = CountingClock()
    workers = fleet(300, clock, lambda _: "m")
    clock.calls = 0
    judge.eject_stalled(workers)
    judge.eject_outliers(workers)
    assert clock.calls < 10 * len(workers)
