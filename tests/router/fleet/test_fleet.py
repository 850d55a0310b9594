"""A watched fleet of one worker: probes, event streams, and changes of its sources."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from waiting import until

from indexer import Indexer, MatchQuery, Target
from kvevents import BlockStored, EventBatch
from router.fleet.allowed_networks import AllowedNetworks
from router.fleet.build import FleetWatch
from router.fleet.discovery import ServedModel
from router.fleet.fleet import Fleet
from router.fleet.prober import FAILED_PROBES, retry_seconds
from router.fleet.worker import Worker
from router.settings import FleetSettings, WorkerSettings
from worker import ZmqEventPublisher

QUICK = FleetSettings(probe_interval=0.05, probe_timeout=1.0)
TOKENS = list(range(33))


class WorkerServer:
    """A vLLM server at one address that can be stopped, started again, and made to fail."""

    def __init__(self) -> None:
        self.sources: dict[str, Any] = {}
        self.models = ["m"]
        self.failures: float = 0  # number of following requests that fail
        self.asked = 0
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._answer(lambda: {"data": [{"id": name} for name in self.models]}))
        app.router.add_get("/kv_event_sources", self._answer(lambda: self.sources))
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _answer(self, body: Callable[[], Any]) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.Response:
            if request.path == "/v1/models":
                self.asked += 1
                if self.failures:
                    self.failures -= 1
                    return web.Response(status=500)
            return web.json_response(body())

        return handler


class Watched:
    """A watched fleet of one worker, with its index."""

    def __init__(self, server: WorkerServer, indexer: Indexer, session: aiohttp.ClientSession, **settings: Any) -> None:
        self.models: list[ServedModel] = []
        self.indexer = indexer
        fleet_settings = QUICK.model_copy(update=settings)
        networks = AllowedNetworks(fleet_settings.allowed_networks)
        self.fleet = Fleet([WorkerSettings(url=server.url)], fleet_settings, indexer)
        self.watch = FleetWatch(self.fleet, fleet_settings, indexer, session, networks, self._on_model)
        self.worker = self.fleet.workers[0]

    async def _on_model(self, worker: Worker, model: ServedModel) -> None:
        assert worker is self.worker
        self.models.append(model)

    def matched(self) -> int:
        """Return the tokens that the worker has cached, by the index."""
        return max((match.matched_tokens for match in self.indexer.match(MatchQuery("m", TOKENS))), default=0)


@asynccontextmanager
async def watching(server: WorkerServer, **settings: Any) -> AsyncIterator[Watched]:
    indexer = Indexer()
    indexer.start()
    try:
        async with aiohttp.ClientSession() as session:
            watched = Watched(server, indexer, session, **settings)
            await watched.watch.start()
            try:
                yield watched
            finally:
                await watched.watch.stop()
    finally:
        await asyncio.to_thread(indexer.stop)


@pytest.fixture
async def server() -> AsyncIterator[WorkerServer]:
    server = WorkerServer()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def watched(server: WorkerServer) -> AsyncIterator[Watched]:
    async with watching(server) as watched:
        yield watched


@asynccontextmanager
async def stream(*stored: BlockStored) -> AsyncIterator[dict[str, Any]]:
    """Publish blocks on an event stream, and yield its description in the form of vLLM."""
    publisher = ZmqEventPublisher(0, endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0", bind=True)
    if stored:
        publisher.publish(EventBatch(time.time(), list(stored)))
    try:
        yield {"0": {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}}
    finally:
        await asyncio.to_thread(publisher.shutdown)


def blocks(count: int) -> BlockStored:
    return BlockStored(
        block_hashes=list(range(count)), parent_block_hash=None, token_ids=TOKENS[: 16 * count], block_size=16
    )


async def test_worker_that_answers_is_up(server: WorkerServer, watched: Watched) -> None:
    assert watched.worker.up
    assert watched.fleet.names() == {"m"}
    assert watched.fleet.serving("m") == [(watched.worker, ServedModel("m", "m"))]
    assert watched.fleet.serving("n") == []
    assert watched.models == [ServedModel("m", "m")]
    assert [known.target for known in watched.indexer.registered()] == [Target(server.url, 0, "m")]


async def test_worker_that_starts_later_is_found(server: WorkerServer) -> None:
    await server.stop()
    async with watching(server) as watched:
        assert not watched.worker.up
        assert watched.worker.problem is not None
        assert server.url in watched.worker.problem
        assert watched.fleet.names() == set()
        await server.start()
        await until(lambda: watched.worker.up)
        assert watched.fleet.names() == {"m"}


async def test_restarted_worker_with_another_event_port_has_only_its_new_blocks(server: WorkerServer) -> None:
    async with stream(blocks(2)) as server.sources, watching(server) as watched:
        await until(lambda: watched.matched() == 32)
        await server.stop()
        await until(lambda: not watched.worker.up)
        async with stream(blocks(1)) as server.sources:
            await server.start()
            await until(lambda: watched.matched() == 16)
        (registration,) = watched.indexer.registered()
        assert registration.source.endpoint == server.sources["0"]["endpoint"]


async def test_removed_ranks_are_unregistered(server: WorkerServer) -> None:
    async with stream() as first, stream() as second:
        server.sources = {"0": first["0"], "1": second["0"]}
        async with watching(server) as watched:
            assert watched.worker.ranks() == (0, 1)
            assert {known.target.dp_rank for known in watched.indexer.registered()} == {0, 1}
            server.sources = {"0": first["0"]}
            await until(lambda: watched.worker.ranks() == (0,))
            assert {known.target.dp_rank for known in watched.indexer.registered()} == {0}


async def test_model_that_is_loaded_later_is_found(server: WorkerServer, watched: Watched) -> None:
    server.models = ["m", "n"]
    await until(lambda: watched.fleet.names() == {"m", "n"})
    assert ServedModel("n", "n") in watched.models


async def test_probe_marks_worker_down_after_three_failures(server: WorkerServer, watched: Watched) -> None:
    asked = server.asked
    server.failures = inf
    await until(lambda: not watched.worker.up)
    assert server.asked - asked >= FAILED_PROBES
    assert "500" in (watched.worker.problem or "")
    server.failures = 0
    await until(lambda: watched.worker.up)


async def test_probe_keeps_worker_up_after_two_failures(server: WorkerServer, watched: Watched) -> None:
    for _ in range(2):
        server.failures = 2

        def recovered() -> bool:
            assert watched.worker.up
            return server.failures == 0 and watched.worker.failed_probes == 0

        await until(recovered)


async def test_probe_without_answer_in_time_fails(server: WorkerServer) -> None:
    async with watching(server, probe_timeout=0.000001) as watched:
        assert not watched.worker.up
        assert watched.worker.problem == "no answer within 1e-06 s"


async def test_reported_failure_marks_worker_down_and_probes_it_soon(server: WorkerServer) -> None:
    async with watching(server, probe_interval=3600) as watched:
        await asyncio.sleep(0)  # the probe task now waits for the next interval
        watched.fleet.report_failure(watched.worker, "connection refused")
        assert not watched.worker.up
        assert watched.worker.problem == "connection refused"
        await until(lambda: watched.worker.up)


async def test_event_stream_is_followed_and_its_blocks_are_kept_while_the_worker_is_down(server: WorkerServer) -> None:
    """A failed request does not show that the worker was restarted. A restarted worker clears its stream."""
    async with stream(blocks(2)) as server.sources, watching(server) as watched:
        await until(lambda: watched.matched() == 32)
        watched.fleet.report_failure(watched.worker, "connection reset")
        await until(lambda: watched.worker.up)
        assert watched.matched() == 32


async def test_worker_with_an_invalid_event_endpoint_stays_up(server: WorkerServer) -> None:
    server.sources = {"0": {"endpoint": "nowhere"}}
    async with watching(server) as watched:
        assert watched.worker.up
        assert [known.source for known in watched.indexer.registered()] == [None]
        assert "nowhere" in watched.worker.description.refused[0]


async def test_removed_worker_is_not_watched_and_is_unregistered(server: WorkerServer, watched: Watched) -> None:
    removed: list[Worker] = []
    watched.fleet.on_removed.append(removed.append)
    watched.fleet.assign("config", [])
    assert removed == [watched.worker]
    assert (watched.fleet.workers, watched.indexer.registered()) == ([], [])
    asked = server.asked
    await asyncio.sleep(5 * QUICK.probe_interval)
    assert server.asked <= asked + 1  # a request may have been sent before


async def test_added_worker_is_watched(server: WorkerServer, watched: Watched) -> None:
    watched.fleet.assign("config", [])
    watched.fleet.assign("api", [WorkerSettings.model_validate({"url": server.url})])
    (watched.worker,) = watched.fleet.workers
    await until(lambda: watched.worker.up)
    assert watched.worker.source == "api"


def test_workers_that_are_down_are_asked_less_often_if_very_many_are(indexer: Indexer) -> None:
    settings = [WorkerSettings.model_validate({"url": f"http://127.0.0.1:{port}"}) for port in range(1, 1001)]
    fleet = Fleet(settings, FleetSettings(), indexer)
    assert retry_seconds(fleet, 1.0) == 5.0
    assert retry_seconds(fleet, 10.0) == 10.0
    for worker in fleet.workers[900:]:
        worker.problem = None
    assert retry_seconds(fleet, 1.0) == 4.5
    for worker in fleet.workers[100:900]:
        worker.problem = None
    assert retry_seconds(fleet, 1.0) == 1.0


async def test_a_worker_that_stays_down_changes_nothing(server: WorkerServer, watched: Watched) -> None:
    await server.stop()
    await until(lambda: not watched.worker.up)
    version, failed = watched.fleet.version, watched.worker.failed_probes
    await until(lambda: watched.worker.failed_probes >= failed + 3)
    assert watched.fleet.version == version
