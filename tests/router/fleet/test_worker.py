"""Warm-up of workers, and the workers that a request may be sent to."""

from __future__ import annotations

from random import Random

import pytest
from manual_clock import Clock

from router.fleet.circuit import CircuitLimits
from router.fleet.health import Health
from router.fleet.worker import Worker, WorkerState, choosable
from router.settings import WorkerSettings


@pytest.fixture
def clock() -> Clock:
    return Clock()


def worker(clock: Clock, warming: float | None = None) -> Worker:
    made = Worker(
        WorkerSettings.model_validate({"url": "http://w"}), health=Health(CircuitLimits(), clock), slow_start=10
    )
    made.problem = None
    made.warming_since = None if warming is None else clock.now - warming
    return made


@pytest.mark.parametrize(("seconds", "share"), [(0.0, 0.1), (2.0, 0.2), (5.0, 0.5), (10.0, 1.0), (60.0, 1.0)])
def test_share_grows_during_warm_up(clock: Clock, seconds: float, share: float) -> None:
    new, old = worker(clock, warming=seconds), worker(clock)
    assert new.share == pytest.approx(share)
    assert new.state is (WorkerState.WARMING if share < 1 else WorkerState.READY)
    random = Random(1)
    chosen = sum(new in choosable([new, old], random) for _ in range(1000))
    assert chosen == pytest.approx(1000 * share, abs=50)


def test_all_workers_are_choosable_when_all_warm_up(clock: Clock) -> None:
    new = [worker(clock, warming=0), worker(clock, warming=0)]
    assert all(choosable(new, Random(seed)) for seed in range(50))


def test_ejected_workers_are_choosable_when_no_others_exist(clock: Clock) -> None:
    good, bad = worker(clock), worker(clock)
    bad.health.circuit.open("it hangs")
    assert bad.state is WorkerState.EJECTED
    assert list(choosable([good, bad], Random())) == [good]
    assert list(choosable([bad], Random())) == [bad]


def test_half_open_worker_is_choosable_after_an_answered_scrape(clock: Clock) -> None:
    good, bad = worker(clock), worker(clock)
    bad.metrics.scrape_answered()
    bad.metrics.scrape_began()
    bad.health.circuit.open("it hangs")
    clock.now += 60
    assert bad.state is WorkerState.HALF_OPEN
    assert list(choosable([good, bad], Random())) == [good]
    bad.metrics.scrape_answered()
    assert list(choosable([good, bad], Random())) == [good, bad]
