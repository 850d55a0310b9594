"""The selector that several handles of a Ray deployment share."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator

import pytest

from kvrouter.adapters import shared_selector
from kvrouter.adapters.shared_selector import ReplicaDescription, SharedSelector
from kvrouter.selection import NoWorker, Prompt, Saturated

REPLICAS = ["a", "b"]


def prompt(start: int = 0, adapter: str | None = None) -> Prompt:
    return Prompt(model="m", token_ids=range(start, start + 64), adapter=adapter)


@pytest.fixture
async def shared() -> AsyncIterator[SharedSelector]:
    shared = SharedSelector("m")
    await shared.start()
    for id in REPLICAS:
        await shared.upsert("first", id, ReplicaDescription(block_size=16))
    yield shared
    await shared.close()


async def in_flight(shared: SharedSelector) -> int:
    return sum((await shared.status())["in_flight"].values())


async def test_request_is_reserved_until_its_release(shared: SharedSelector) -> None:
    chosen, rank, missing = await shared.reserve("handle", "r", prompt(), ["a", "b"])
    assert (chosen in ("a", "b"), rank, missing) == (True, 0, [])
    assert await in_flight(shared) == 1
    for _ in range(2):
        await shared.release("r")
    assert await in_flight(shared) == 0
    assert (await shared.reserve("other", "s", prompt(), ["a", "b"]))[0] == chosen


async def test_request_that_is_chosen_again_counts_once(shared: SharedSelector) -> None:
    for allowed in (["a"], ["b"]):
        assert (await shared.reserve("handle", "r", prompt(), allowed))[0] == allowed[0]
    assert await in_flight(shared) == 1


async def test_replicas_that_are_not_known_are_named(shared: SharedSelector) -> None:
    assert (await shared.reserve("handle", "r", prompt(), ["a", "new"]))[2] == ["new"]
    with pytest.raises(NoWorker):
        await shared.reserve("handle", "s", prompt(), ["new"])
    assert await shared.beat("handle", ["r"], REPLICAS) == ["a", "b"]


async def test_reservations_that_a_handle_does_not_report_end(shared: SharedSelector) -> None:
    for id in ("running", "lost"):
        await shared.reserve("handle", id, prompt(), ["a", "b"])
    await shared.reserve("other", "theirs", prompt(), ["a", "b"])
    await shared.beat("handle", ["running"], REPLICAS)
    assert await in_flight(shared) == 2
    await shared.beat("handle", [], REPLICAS)
    assert await in_flight(shared) == 1


async def test_reservations_of_a_silent_handle_end(shared: SharedSelector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_selector, "SILENT_SECONDS", 0.3)
    await shared.reserve("killed", "r", prompt(), ["a", "b"])
    assert not shared.silent()
    async with asyncio.timeout(10):
        while await in_flight(shared) or not shared.silent():  # noqa: ASYNC110 - nothing is sent at an expiry
            await asyncio.sleep(0.01)
    await shared.beat("other", [], REPLICAS)
    assert (await shared.status())["handles"] == 1


async def test_replica_that_is_gone_ends_its_reservations(shared: SharedSelector) -> None:
    await shared.reserve("handle", "r", prompt(), ["a"])
    for _ in range(2):
        await shared.delete("a")
    assert (await shared.status())["in_flight"] == {"b": 0}
    await shared.release("r")


async def test_replica_that_no_handle_reports_is_removed(
    shared: SharedSelector, monkeypatch: pytest.MonkeyPatch
) -> None:
    await shared.reserve("first", "r", prompt(), ["a"])
    await shared.upsert("second", "new", ReplicaDescription())
    assert await shared.beat("second", [], ["new"]) == ["a", "b", "new"]  # the first handle may still reach them
    monkeypatch.setattr(shared_selector, "SILENT_SECONDS", 0.05)
    await asyncio.sleep(0.1)
    assert await shared.beat("second", [], ["new"]) == ["new"]
    assert (await shared.status())["in_flight"] == {"new": 0}
    assert await shared.beat("second", [], []) == []


async def test_adapter_of_a_request_is_learned_and_shares_no_blocks(shared: SharedSelector) -> None:
    for adapter in ("one", "two", None):
        chosen, _, _ = await shared.reserve("handle", "r", prompt(adapter=adapter), ["a"])
        held = shared.selector.reservation("r")
        assert held is not None
        assert (chosen, held.selection.overlap) == ("a", 0)
    await shared.upsert("first", "c", ReplicaDescription())
    assert (await shared.reserve("handle", "r", prompt(adapter="one"), ["c"]))[0] == "c"


async def test_adapters_are_bounded(shared: SharedSelector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_selector, "MOST_ADAPTERS", 1)
    await shared.reserve("handle", "r", prompt(adapter="one"), ["a"])
    with pytest.raises(ValueError, match="adapter: 1"):
        await shared.reserve("handle", "s", prompt(adapter="two"), ["a"])
    assert await in_flight(shared) == 1


def test_errors_survive_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(Saturated("All targets are full.", 2.0)))
    assert (str(error), error.retry_after) == ("All targets are full.", 2.0)
