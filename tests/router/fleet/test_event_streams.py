"""Event streams of workers and of registrations over HTTP: the addresses to which they are connected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address

import pytest

from indexer import Indexer, Registration, Target
from kvevents import EventSource
from router.fleet.allowed_networks import Address, AllowedNetworks
from router.fleet.event_streams import RegisteredStreams, allowed_sources
from router.http.event_loop import end_tasks

TARGET = Target("w", 0, "m")


class Names(AllowedNetworks):
    """Host names with addresses from the test; any other host is its own address."""

    def __init__(self, **names: str) -> None:
        super().__init__(["10.0.0.0/8"])
        self.names = names
        self.asked = 0

    async def check(self, host: str) -> list[Address]:
        self.asked += 1
        address = self.names.get(host, host)
        return await super().check(address) if address[0].isdigit() else [ip_address("10.9.9.9")]


def registration(endpoint: str, replay: str | None = None) -> Registration:
    return Registration(TARGET, EventSource(0, endpoint, replay), "vLLM", 16)


@asynccontextmanager
async def following(names: Names) -> AsyncIterator[tuple[Indexer, RegisteredStreams]]:
    indexer = Indexer()
    streams = RegisteredStreams(indexer, names, resolve_interval=0.02)
    task = asyncio.create_task(streams.run())
    try:
        yield indexer, streams
    finally:
        await end_tasks([task])
        indexer.stop()


def followed(indexer: Indexer) -> list[str]:
    return [known.source.endpoint for known in indexer.registered() if known.source is not None]


async def asked_again(names: Names, times: int = 2) -> None:
    """Wait until the names were resolved a few times more."""
    wanted, deadline = names.asked + times, time.monotonic() + 5
    while names.asked < wanted:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(("changed", "expected"), [("10.0.0.2", "10.0.0.2"), ("192.0.2.1", "10.0.0.1")])
async def test_changed_address_is_followed_within_the_networks(changed: str, expected: str) -> None:
    names = Names(worker="10.0.0.1")
    async with following(names) as (indexer, streams):
        indexer.register(await streams.admit(registration("tcp://worker:5557", "tcp://worker:5558")))
        assert followed(indexer) == ["tcp://10.0.0.1:5557"]
        names.names["worker"] = changed
        await asked_again(names, 4)
        assert followed(indexer) == [f"tcp://{expected}:5557"]


async def test_unregistered_stream_stays_unregistered() -> None:
    names = Names(worker="10.0.0.1")
    async with following(names) as (indexer, streams):
        indexer.register(await streams.admit(registration("tcp://worker:5557")))
        await asked_again(names)
        indexer.unregister([TARGET])
        names.names["worker"] = "10.0.0.2"
        await asyncio.sleep(0.1)  # a few intervals
        assert followed(indexer) == []


@pytest.mark.parametrize("endpoint", ["tcp://192.0.2.1:1", "tcp://169.254.169.254:1", "ipc:///tmp/x", "inproc://wake"])
async def test_endpoint_outside_of_the_networks_is_refused(endpoint: str) -> None:
    async with following(Names()) as (_, streams):
        for refused in (registration(endpoint), registration("tcp://10.0.0.1:1", endpoint)):
            with pytest.raises(ValueError, match=r"^(replay_)?endpoint: "):
                await streams.admit(refused)


async def test_own_host_of_a_configured_worker_is_not_checked() -> None:
    sources = [
        EventSource(0, "tcp://public.example:1"),
        EventSource(1, "tcp://192.0.2.7:1"),
        EventSource(2, "tcp://10.1.1.1:1"),
    ]
    allowed, refused = await allowed_sources(Names(), sources, own_host="public.example")
    assert [source.dp_rank for source in allowed] == [0, 2]
    assert allowed[0] == sources[0]
    assert len(refused) == 1
    assert "192.0.2.7" in refused[0]
