"""When a router that starts is ready for requests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from waiting import eventually

from indexer import Indexer
from router.app.readiness import Readiness
from router.fleet.fleet import Fleet
from router.settings import FleetSettings


@pytest.fixture
def indexer() -> Iterator[Indexer]:
    started = Indexer()
    started.start()
    yield started
    started.stop()


def test_router_that_needs_no_worker_first_waits_for_the_workers_that_exist(indexer: Indexer) -> None:
    """A model that no worker was seen to serve is refused, so requests must not arrive before discovery ends."""
    readiness = Readiness(Fleet([], FleetSettings(), indexer), indexer, 0.2, without_workers=True)
    assert readiness.problem() == "no worker answers"
    eventually(lambda: readiness.problem() is None)


def test_router_that_needs_a_worker_is_not_ready_without(indexer: Indexer) -> None:
    readiness = Readiness(Fleet([], FleetSettings(), indexer), indexer, 0.0)
    assert readiness.problem() == "no worker answers"
