"""The choice of an encode worker for each media item, the queue there, and the learned times."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
from manual_clock import Clock

from indexer import Indexer
from router.fleet.discovery import Engine, ServedModel, WorkerDescription
from router.fleet.fleet import Fleet
from router.fleet.health import Outcome
from router.fleet.worker import Worker
from router.load.target_load import LoadTable
from router.routing.encoders import Encoders, EncodeTurn
from router.settings import FleetSettings, Role, WorkerSettings

ITEMS = range(1000, 7000)
MODELS = {"m": ServedModel("m", "m")}


def make_fleet(indexer: Indexer, names: Sequence[str], engine: Engine = Engine.VLLM, weight: float = 1.0) -> Fleet:
    """Return a fleet of encode workers that answer; the first one has a weight."""
    settings = [
        WorkerSettings(url=f"http://{name}:1", role=Role.ENCODE, weight=weight if name == names[0] else 1.0)
        for name in names
    ]
    fleet = Fleet(settings, FleetSettings(slow_start=0), indexer)
    for worker in fleet.workers:
        worker.describe(WorkerDescription(engine, MODELS))
        worker.problem = None
    fleet.changed()
    return fleet


def make_encoders(fleet: Fleet, clock: Clock, per_encoder: int = 16) -> Encoders:
    return Encoders(fleet, LoadTable(clock), Random(1), clock, per_encoder)


def chosen(encoders: Encoders, key: int) -> Worker:
    worker = encoders.choose("m", key)
    assert worker is not None
    return worker


def test_added_worker_takes_over_only_its_own_items(indexer: Indexer, clock: Clock) -> None:
    three, four = (make_encoders(make_fleet(indexer, names), clock) for names in ("abc", "abcd"))
    before = {key: chosen(three, key).url for key in ITEMS}
    after = {key: chosen(four, key).url for key in ITEMS}
    moved = {key for key in ITEMS if before[key] != after[key]}
    assert {after[key] for key in moved} == {"http://d:1"}
    assert len(moved) == pytest.approx(len(ITEMS) / 4, rel=0.1)


def test_items_are_spread_by_weight(indexer: Indexer, clock: Clock) -> None:
    encoders = make_encoders(make_fleet(indexer, "abc", weight=2.0), clock)
    counts = Counter(chosen(encoders, key).url for key in ITEMS)
    assert [counts[f"http://{name}:1"] / len(ITEMS) for name in "abc"] == pytest.approx([0.5, 0.25, 0.25], rel=0.1)


def test_popular_item_does_not_overload_its_worker(indexer: Indexer, clock: Clock) -> None:
    encoders = make_encoders(make_fleet(indexer, "abcd"), clock)
    placed: Counter[str] = Counter()
    for _ in range(80):
        worker = chosen(encoders, 1)
        encoders.place(worker)
        placed[worker.url] += 1
    assert max(placed.values()) <= 1.25 * 80 / 4 + 1
    assert sum(placed.values()) == 80


def test_few_items_stay_together(indexer: Indexer, clock: Clock) -> None:
    encoders = make_encoders(make_fleet(indexer, "abcd"), clock)
    first = chosen(encoders, 1)
    for _ in range(3):
        encoders.place(first)
    assert chosen(encoders, 1) is first
    encoders.place(first)
    assert chosen(encoders, 1) is not first


def test_excluded_stopped_and_ejected_workers_are_passed_over(indexer: Indexer, clock: Clock) -> None:
    fleet = make_fleet(indexer, "abc")
    encoders = make_encoders(fleet, clock)
    first = chosen(encoders, 1)
    second = encoders.choose("m", 1, [first])
    assert second is not None
    assert second is not first
    fleet.drain(first, True)
    assert chosen(encoders, 1) is second
    for _ in range(3):
        second.health.begin(1).end(Outcome.FAILED, "status 500")
    assert encoders.choose("m", 1) not in (first, second)
    assert encoders.choose("other", 1) is None


def test_sglang_encode_workers_receive_nothing(indexer: Indexer, clock: Clock) -> None:
    fleet = make_fleet(indexer, "ab", Engine.SGLANG)
    assert (fleet.encodes, make_encoders(fleet, clock).choose("m", 1)) == (False, None)


async def test_items_beyond_the_bound_wait_in_order(indexer: Indexer, clock: Clock) -> None:
    fleet = make_fleet(indexer, "a")
    encoders = make_encoders(fleet, clock, per_encoder=2)
    worker, sent = fleet.workers[0], list[int]()
    turns: list[EncodeTurn] = []
    for number in range(5):
        turns.append(encoders.place(worker))
        turns[-1].wait(lambda number=number: sent.append(number))  # type: ignore[misc]
    assert sent == [0, 1]
    turns[2].end()  # its client left while it waited
    turns[0].end()
    turns[0].end()
    await asyncio.sleep(0)
    assert sent == [0, 1, 3]
    turns[3].end()
    turns[1].end()
    await asyncio.sleep(0)
    assert sent == [0, 1, 3, 4]


async def test_item_that_ends_as_its_turn_begins_passes_the_turn_on(indexer: Indexer, clock: Clock) -> None:
    fleet = make_fleet(indexer, "a")
    encoders = make_encoders(fleet, clock, per_encoder=1)
    sent = list[int]()
    turns = [encoders.place(fleet.workers[0]) for _ in range(3)]
    for number, turn in enumerate(turns):
        turn.wait(lambda number=number: sent.append(number))  # type: ignore[misc]
    turns[0].end()
    turns[1].end()
    for _ in range(3):
        await asyncio.sleep(0)
    assert sent == [0, 2]


async def test_no_item_is_sent_to_a_full_worker_and_the_refused_one_is_first(indexer: Indexer, clock: Clock) -> None:
    fleet = make_fleet(indexer, "a")
    (worker,) = fleet.workers
    encoders, sent = make_encoders(fleet, clock), list[str]()
    running = encoders.place(worker)
    running.wait(lambda: sent.append("running"))
    busy, refused = worker.health.begin(1, streamed=False), worker.health.begin(1)
    assert fleet.refused(worker, refused, 503, 0.0)
    later, again = encoders.place(worker), encoders.place(worker)
    later.wait(lambda: sent.append("later"))
    again.wait(lambda: sent.append("again"), first=True)
    encoders.wake()
    assert chosen(encoders, 1) is worker, "no other is left"
    assert sent == ["running"]
    busy.end(Outcome.SUCCEEDED)
    running.end()
    await asyncio.sleep(0)
    assert sent[:2] == ["running", "again"]


def test_open_encode_worker_is_chosen_before_full_ones(indexer: Indexer, clock: Clock) -> None:
    fleet = make_fleet(indexer, "abc")
    encoders = make_encoders(fleet, clock)
    for worker in fleet.workers[:2]:
        worker.health.begin(1)
        worker.health.close()
    assert {chosen(encoders, key) for key in ITEMS[:50]} == {fleet.workers[2]}


def test_queue_of_encode_workers_is_predicted(indexer: Indexer, clock: Clock) -> None:
    fleet = make_fleet(indexer, "a")
    encoders = make_encoders(fleet, clock)
    first, second = (encoders.place(fleet.workers[0]) for _ in range(2))
    first.wait(lambda: None)
    second.wait(lambda: None)
    clock.now += 0.5
    first.encoded()
    first.end()
    clock.now += 0.5
    second.encoded()  # half of its time was that of the first
    assert encoders.seconds("m", [1]) == pytest.approx(2 * 0.5)
    second.end()
    assert encoders.seconds("m", [1]) == pytest.approx(0.5)
    assert encoders.seconds("m", [1, 2, 3]) == pytest.approx(1.5)
    assert encoders.seconds("other", [1]) == 0.0
