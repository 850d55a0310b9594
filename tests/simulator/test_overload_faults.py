"""Order and limits of a full fleet whose metrics lag or are missing, or whose workers change."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import fields, replace
from random import Random
from typing import Final

import pytest
from test_overload import AUTO, BLOCK, HIGH, PROFILE, arrivals, long_answers, ttfts

from router.fleet.worker import Worker
from simulator.fleet.engine import Profile
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, Knowledge, SimulatedRouter
from simulator.fleet.workers import SimulatedWorkers

LAG: Final = 20.0
IDLE: Final = "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\nvllm:kv_cache_usage_perc 0\n"
JOINS: Final = 15.0
LEAVES: Final = 30.0


class LateMetrics(SimulatedRouter):
    """A router that reads each scrape 20 seconds later. Until then it reads that the engine is idle."""

    def scraped(self, worker: Worker, metrics: str) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < LAG:
            super().scraped(worker, IDLE)
        loop.call_later(LAG, super().scraped, worker, metrics)


class Lagging(Simulation):
    """A run in which all metrics are 20 seconds old."""

    def make_routers(self) -> list[SimulatedRouter]:
        router = self.make_router()
        return [LateMetrics(*[getattr(router, each.name) for each in fields(router)])]


class ChangingWorkers(SimulatedWorkers):
    """Workers of which some are absent: at first the second one."""

    absent: Collection[int] = (1,)

    def change(self, absent: Collection[int]) -> None:
        self.absent, self.version = absent, self.version + 1

    def able(self, name: str | None, prefill: bool = False) -> Sequence[Worker]:
        return [each for each in super().able(name, prefill) if self.workers.index(each) not in self.absent]


class Changing(Simulation):
    """A run in which the second worker joins, and the first one leaves later."""

    def _make_workers(self) -> SimulatedWorkers:
        return ChangingWorkers(self.spec.roles, self.spec.kv_tokens // BLOCK, BLOCK, self.loop.time)

    def make_routers(self) -> list[SimulatedRouter]:
        (router,) = super().make_routers()

        def change(absent: Collection[int]) -> None:
            assert isinstance(router.workers, ChangingWorkers)
            router.workers.change(absent)
            router.admission.wake()

        self.loop.call_at(JOINS, change, ())
        self.loop.call_at(LEAVES, change, (0,))
        return [router]


class SilentWorkers(SimulatedRouter):
    """A router that can read no metrics."""

    def scraped(self, worker: Worker, metrics: str) -> None:
        pass


class Silent(Simulation):
    """A run in which workers report nothing: no metrics, no events, no size of their cache."""

    def _make_workers(self) -> SimulatedWorkers:
        workers = super()._make_workers()
        for worker in workers.workers:
            assert worker.description is not None
            worker.describe(replace(worker.description, capacity=None))
        workers.registrations = [replace(each, capacity=None) for each in workers.registrations]
        return workers

    def make_routers(self) -> list[SimulatedRouter]:
        router = self.make_router()
        return [SilentWorkers(*[getattr(router, each.name) for each in fields(router)])]


@pytest.mark.parametrize(
    ("profile", "wait"),
    [(replace(PROFILE, kv_tokens=200_000, max_requests=8), 7.0), (PROFILE, 12.0)],
    ids=["slots", "memory"],
)
def test_first_bytes_alone_show_when_a_worker_is_full(profile: Profile, wait: float) -> None:
    requests = arrivals(5.0, 60.0, long_answers)
    found = []
    for side in (replace(AUTO, knowledge=Knowledge.SENT), replace(OURS, knowledge=Knowledge.SENT)):
        outcomes = Silent(FleetSpec(profile, 1, profile.kv_tokens, BLOCK), side, Random(0)).run(requests)
        found.append((max(ttfts(outcomes, HIGH)), sum(each.ended < 60.0 for each in outcomes)))
    assert found[0][0] < wait < 60.0 < found[1][0]
    assert found[0][1] > 0.95 * found[1][1]


def play(kind: type[Simulation], workers: int, seconds: float) -> tuple[Simulation, list[Outcome]]:
    """Send more than twice what one worker can answer."""
    simulation = kind(FleetSpec(PROFILE, workers, PROFILE.kv_tokens, BLOCK), AUTO, Random(0))
    return simulation, simulation.run(arrivals(5.0, seconds, long_answers))


def test_metrics_that_are_20_seconds_old_change_neither_the_order_nor_the_limit() -> None:
    simulation, outcomes = play(Lagging, 1, 40.0)
    assert max(ttfts(outcomes, HIGH)) < 6.0
    assert any(each.refused for each in outcomes)
    assert simulation.engines[0].preemptions < 40


def test_worker_that_joins_a_full_fleet_is_filled_at_once_and_one_that_leaves_receives_nothing_more() -> None:
    simulation, outcomes = play(Changing, 2, 40.0)
    sent = [sorted(each.sent for each in outcomes if each.worker == worker) for worker in (0, 1)]
    assert sent[0][-1] < LEAVES < sent[1][-1]
    assert sent[1][0] == JOINS
    assert sum(each < JOINS + 1.0 for each in sent[1]) > 10
    assert max(ttfts(outcomes, HIGH)) < 6.0
    assert max(each.begun - each.request.arrival for each in outcomes if not each.refused) < 32.0
    assert simulation.engines[1].preemptions < 5
