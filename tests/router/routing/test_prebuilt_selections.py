from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from indexer import Indexer
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.fleet import Fleet
from router.load.target_load import LoadTable
from router.policies import ByTurn, policy_named
from router.policies.peers import RoundRobin
from router.routing.prebuilt_selections import PrebuiltSelections
from router.routing.target_directory import TargetDirectory
from router.settings import FleetSettings, PolicyName, PolicySettings, WorkerSettings


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    indexer = Indexer()
    indexer.start()
    fleet = Fleet([], FleetSettings(), indexer)
    _let_there_be(fleet, 4)
    yield fleet
    indexer.stop()


def _let_there_be(fleet: Fleet, workers: int) -> None:
    """Workers that are up and serve a model."""
    named = [WorkerSettings.model_validate({"url": f"http://w{number}"}) for number in range(workers)]
    fleet.assign("config", named)
    for worker in fleet.workers:
        if worker.description is None:
            worker.describe(WorkerDescription(Engine.VLLM, {"m": ServedModel("m", "m")}))
            worker.problem = None


def _standing(fleet: Fleet, name: PolicyName) -> PrebuiltSelections:
    policy = policy_named(PolicySettings(name=name), Random(1)).choose
    assert isinstance(policy, ByTurn)
    return PrebuiltSelections(fleet, TargetDirectory(fleet, LoadTable()), policy, Random(2))


def _chosen(standing: PrebuiltSelections, times: int) -> Counter[str]:
    choices = [standing.choose("m") for _ in range(times)]
    for choice in choices:
        assert choice is None or choice.rank.target is choice.decision.chosen.target
    return Counter(choice.worker.url for choice in choices if choice)


@pytest.mark.parametrize("name", [PolicyName.ROUND_ROBIN, PolicyName.RANDOM])
def test_workers_that_fail_drain_or_break_are_passed_over(fleet: Fleet, name: PolicyName) -> None:
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


def test_round_robin_stays_even_while_one_is_left_out(fleet: Fleet) -> None:
    standing = _standing(fleet, PolicyName.ROUND_ROBIN)
    assert set(_chosen(standing, 12).values()) == {3}
    fleet.workers[0].problem = "does not answer"
    assert _chosen(standing, 12) == {f"http://w{number}": 4 for number in (1, 2, 3)}


def test_a_worker_that_warms_up_gets_its_share(fleet: Fleet) -> None:
    standing = _standing(fleet, PolicyName.ROUND_ROBIN)
    fleet.workers[0].slow_start, fleet.workers[0].warming_since = 1000.0, fleet.workers[0].health.clock()
    assert 0 < _chosen(standing, 400)["http://w0"] < 30


def test_a_changed_fleet_is_looked_at_anew(fleet: Fleet) -> None:
    standing = _standing(fleet, PolicyName.ROUND_ROBIN)
    _chosen(standing, 4)
    _let_there_be(fleet, 5)
    assert len(_chosen(standing, 10)) == 5


def test_nothing_is_left_to_choose(fleet: Fleet) -> None:
    standing = _standing(fleet, PolicyName.ROUND_ROBIN)
    assert standing.choose("another") is None
    for worker in fleet.workers:
        worker.problem = "does not answer"
    assert standing.choose("m") is None


def test_a_turn_among_thousands_looks_at_one(fleet: Fleet) -> None:
    _let_there_be(fleet, 4096)
    policy = RoundRobin()
    standing = PrebuiltSelections(fleet, TargetDirectory(fleet, LoadTable()), policy, Random(2))
    assert len(_chosen(standing, 8)) == 8
    assert policy.turn(4096) == 8  # so many were taken
