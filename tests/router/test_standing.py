from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import cast

import pytest

from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.policies import ByTurn, policy_named
from router.policies.peers import RoundRobin
from router.routing.load import LoadTable
from router.routing.servers import Servers
from router.routing.standing import Standing
from router.settings import PolicyName, PolicySettings, WorkerSettings


@dataclass
class _Fleet:
    workers: list[Worker]
    version: int = 0

    def able(self, name: str | None, prefill: bool) -> list[Worker]:
        return [worker for worker in self.workers if worker.takes(name, prefill)]


def _worker(number: int) -> Worker:
    worker = Worker(WorkerSettings(url=f"http://w{number}"))  # type: ignore[arg-type]
    worker.description = WorkerDescription(Engine.VLLM, {"m": ServedModel("m", "m")})
    worker.problem = None
    return worker


@pytest.fixture
def fleet() -> _Fleet:
    return _Fleet([_worker(number) for number in range(4)])


def _standing(fleet: _Fleet, name: PolicyName) -> Standing:
    policy = policy_named(PolicySettings(name=name), Random(1))
    assert isinstance(policy, ByTurn)
    servers = Servers(cast(Fleet, fleet), LoadTable())
    return Standing(cast(Fleet, fleet), servers, policy, Random(2))


def _chosen(standing: Standing, times: int) -> Counter[str]:
    choices = [standing.choose("m") for _ in range(times)]
    for choice in choices:
        assert choice is None or choice.rank.target is choice.decision.choice.target
    return Counter(choice.worker.url for choice in choices if choice)


@pytest.mark.parametrize("name", [PolicyName.ROUND_ROBIN, PolicyName.RANDOM])
def test_workers_that_fail_drain_or_break_are_passed_over(fleet: _Fleet, name: PolicyName) -> None:
    standing = _standing(fleet, name)
    assert len(_chosen(standing, 100)) == 4
    fleet.workers[0].problem = "does not answer"
    fleet.workers[1].draining = True
    fleet.workers[2].health.circuit.open("it fails")
    for _ in range(10):
        choice = standing.choose("m")
        assert choice is None or choice.worker is fleet.workers[3]
    fleet.workers[0].problem = None
    assert fleet.workers[0].url in _chosen(standing, 100)


def test_round_robin_stays_even_while_one_is_left_out(fleet: _Fleet) -> None:
    standing = _standing(fleet, PolicyName.ROUND_ROBIN)
    assert set(_chosen(standing, 12).values()) == {3}
    fleet.workers[0].problem = "does not answer"
    assert _chosen(standing, 12) == {f"http://w{number}": 4 for number in (1, 2, 3)}


def test_a_worker_that_warms_up_gets_its_share(fleet: _Fleet) -> None:
    standing = _standing(fleet, PolicyName.ROUND_ROBIN)
    fleet.workers[0].slow_start, fleet.workers[0].warming_since = 1000.0, fleet.workers[0].health.clock()
    assert 0 < _chosen(standing, 400)["http://w0"] < 30


def test_a_changed_fleet_is_looked_at_anew(fleet: _Fleet) -> None:
    standing = _standing(fleet, PolicyName.ROUND_ROBIN)
    _chosen(standing, 4)
    fleet.workers.append(_worker(4))
    fleet.version += 1
    assert len(_chosen(standing, 10)) == 5


def test_nothing_is_left_to_choose(fleet: _Fleet) -> None:
    standing = _standing(fleet, PolicyName.ROUND_ROBIN)
    assert standing.choose("another") is None
    for worker in fleet.workers:
        worker.problem = "does not answer"
    assert standing.choose("m") is None


def test_a_turn_among_thousands_looks_at_one(fleet: _Fleet) -> None:
    fleet.workers += [_worker(number) for number in range(4, 4096)]
    policy = RoundRobin()
    standing = Standing(cast(Fleet, fleet), Servers(cast(Fleet, fleet), LoadTable()), policy, Random(2))
    assert len(_chosen(standing, 8)) == 8
    assert policy.turn(4096) == 8  # so many were taken
