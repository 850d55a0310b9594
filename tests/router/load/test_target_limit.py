"""The limit of a DP rank that computes itself from what its engine reports."""

from __future__ import annotations

import pytest

from router.fleet.engine_metrics import EngineView
from router.load.target_limit import TargetLimit


def view(running: int, queue: int | None = 0, usage: float = 0.2, preemptions: int = 0, unseen: int = 0) -> EngineView:
    return EngineView(unseen, 0, usage, queue, running, preemptions)


def test_nothing_is_limited_before_an_engine_reports_anything() -> None:
    limit = TargetLimit()
    assert limit.has_slot(10_000)
    assert limit.memory is None


def test_slots_are_those_in_use_while_requests_wait_and_memory_is_free() -> None:
    limit = TargetLimit()
    for _ in range(3):
        limit.read(view(running=2, queue=4), None, 0, 0.0)
    assert limit.slots == 2
    assert limit.has_slot(2)  # one more waits in the engine, so that it begins at once
    assert not limit.has_slot(3)


@pytest.mark.parametrize(
    "views",
    [
        [view(running=each, queue=4) for each in (2, 3, 4, 5)],  # they are admitted step by step
        [view(running=2, queue=4, usage=0.97)] * 5,  # they wait for memory
        [view(running=2, queue=0)] * 5,
        [view(running=2, queue=None)] * 5,
    ],
)
def test_slots_stay_unknown_if_requests_wait_for_something_else(views: list[EngineView]) -> None:
    limit = TargetLimit()
    for each in views:
        limit.read(each, None, 0, 0.0)
    assert limit.slots is None


def test_engine_that_runs_more_requests_than_its_slots_has_more_slots() -> None:
    limit = TargetLimit()
    for _ in range(3):
        limit.read(view(running=2, queue=1), None, 0, 0.0)
    limit.read(view(running=3), None, 0, 0.0)
    assert limit.slots is None


def test_preemption_lowers_the_memory_which_recovers_slowly() -> None:
    limit = TargetLimit()
    limit.read(view(running=9, preemptions=5), 1000, 0, 0.0)  # the preemptions before the first scrape do not count
    assert limit.memory == 950
    limit.read(view(running=9, preemptions=6), 1000, 0, 1.0)
    assert limit.memory == 855
    limit.read(view(running=9, preemptions=9), 1000, 0, 2.0)  # of requests that were sent before
    assert limit.memory == 857
    limit.read(view(running=9, preemptions=9), 1000, 0, 11.0)
    assert limit.memory == 875
    limit.read(view(running=9, preemptions=0), 1000, 0, 500.0)  # restarted
    assert limit.memory == 950


def test_memory_never_falls_below_half_of_the_capacity() -> None:
    limit = TargetLimit()
    for preemptions in range(30):
        limit.read(view(running=9, preemptions=preemptions), 1000, 0, 20.0 * preemptions)
        assert limit.memory is not None
        assert limit.memory >= 500
    assert limit.memory is not None
    assert limit.memory < 600


def test_memory_of_other_clients_is_not_available() -> None:
    limit = TargetLimit()
    limit.read(view(running=3, usage=0.5, unseen=1), 1000, 300, 0.0)
    assert limit.memory == 750
    limit.read(view(running=2, usage=0.5, unseen=0), 1000, 300, 1.0)  # metrics that lag do not
    assert limit.memory == 950


def test_capacity_of_a_description_is_a_limit_until_metrics_are_read() -> None:
    limit = TargetLimit()
    limit.discovered(1000)
    assert (limit.capacity, limit.memory) == (1000, 950)
    limit.read(view(running=0), None, 0, 1.0)
    limit.discovered(1000)
    assert limit.memory is None
