"""Several routers and a real Redis: what is shared, what its loss costs, and restarts under load."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import trustme
import yaml
from waiting import until

from benchmarks.ports import free_port
from benchmarks.replicas.redis_server import RedisServer, has_tls
from kvrouter.processes import KvrouterProcess
from router.http.event_loop import end_tasks
from router.load.target_load import LoadTable, ReservedLoad
from router.sharing import LoadSharing, PeerLoad
from router.sharing.channels import RedisChannel

pytestmark = pytest.mark.replicas

EXPIRY = 0.6
BODY = {
    "model": "simulated",
    "prompt": "Tell me more. " * 40,
    "stream": True,
    "ignore_eos": True,
}


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


class Replica:
    """The load sharing of one router, without the router."""

    def __init__(self, url: str, prefix: str = "kvrouter") -> None:
        self.table = LoadTable()
        self.sharing = LoadSharing(self.table, PeerLoad(EXPIRY, 1.0), [RedisChannel(url, prefix, 0.005, EXPIRY)])
        self.table.on_change.append(self.sharing.changed)
        self.peer_load = self.sharing.peer_load

    @property
    def problem(self) -> str | None:
        return self.sharing.channels[0].problem

    def seen(self) -> int:
        """Requests of others on the worker w."""
        return self.peer_load.of("w", 0).requests


@asynccontextmanager
async def replicas(*urls: str, prefix: str = "kvrouter") -> AsyncIterator[list[Replica]]:
    started = [Replica(url, prefix) for url in urls]
    for each in started:
        each.sharing.start()
    try:
        yield started
    finally:
        for each in started:
            await each.sharing.stop()


def test_replicas_share_load_and_forget_stopped_ones(redis: RedisServer) -> None:
    async def play() -> None:
        async with replicas(redis.url, redis.url, redis.url) as (one, two, three):
            held = ReservedLoad(one.table.of("w", 0), 5, 10)
            ReservedLoad(two.table.of("w", 0), 5, 10)
            await until(lambda: three.seen() == 2 and two.seen() == 1)
            held.release()
            await until(lambda: three.seen() == 1)
            await two.sharing.stop()  # it says goodbye
            await until(lambda: three.seen() == 0, EXPIRY / 2)
            ReservedLoad(one.table.of("w", 0), 5, 10)
            await until(lambda: three.seen() == 1)
            await one.sharing.kill()  # it does not
            await until(lambda: three.seen() == 0)
            async with replicas(redis.url) as [late]:
                ReservedLoad(three.table.of("w", 0), 5, 10)
                await until(lambda: late.seen() == 1)

    asyncio.run(play())


def test_prefixes_separate_fleets(redis: RedisServer) -> None:
    async def play() -> None:
        async with (
            replicas(redis.url, redis.url, prefix="blue") as (one, two),
            replicas(redis.url, prefix="green") as [stranger],
        ):
            ReservedLoad(one.table.of("w", 0), 5, 10)
            await until(lambda: two.seen() == 1)
            assert stranger.peer_load.routers() == []

    asyncio.run(play())


def test_lost_redis_is_reported_and_reconnected(redis: RedisServer) -> None:
    async def play() -> None:
        async with replicas(redis.url, redis.url) as (one, two):
            ReservedLoad(one.table.of("w", 0), 5, 10)
            await until(lambda: two.seen() == 1)
            redis.kill()
            await until(lambda: one.problem is not None and two.problem is not None)
            await until(lambda: two.seen() == 0)
            ReservedLoad(one.table.of("w", 0), 5, 10)  # nothing waits for it
            redis.start()
            await until(lambda: two.seen() == 2)
            redis.signal(signal.SIGSTOP)
            await until(lambda: "silent" in (two.problem or ""))
            redis.signal(signal.SIGCONT)
            await until(lambda: two.problem is None and two.seen() == 2)

    asyncio.run(play())


def test_redis_password_is_used() -> None:
    with RedisServer(["--requirepass", "secret"]) as server:
        place = f"127.0.0.1:{server.port}/0"
        asyncio.run(share(f"redis://:secret@{place}", f"redis://:secret2@{place}", "invalid"))


def test_redis_tls_is_verified(tmp_path: Path) -> None:
    if not has_tls():
        pytest.skip("this Redis was built without TLS: install one that has it")
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    ca, chain, key = tmp_path / "ca.pem", tmp_path / "chain.pem", tmp_path / "key.pem"
    authority.cert_pem.write_to_path(str(ca))
    certificate.cert_chain_pems[0].write_to_path(str(chain))
    certificate.private_key_pem.write_to_path(str(key))
    tls = ["--tls-cert-file", str(chain), "--tls-key-file", str(key), "--tls-ca-cert-file", str(ca)]
    port = free_port()
    options = ["--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", *tls]
    with RedisServer(options, port) as server:
        place = f"127.0.0.1:{server.port}/0"
        asyncio.run(share(f"rediss://{place}?ssl_ca_certs={ca}", f"rediss://{place}", "certificate verify failed"))


async def share(good: str, bad: str, why: str) -> None:
    """Two replicas share their load by the good URL; a third is refused with the bad one, and says why."""
    async with replicas(good, good, bad) as (one, two, refused):
        ReservedLoad(one.table.of("w", 0), 5, 10)
        await until(lambda: two.seen() == 1)
        await until(lambda: why in (refused.problem or ""))
        assert "secret" not in json.dumps([*refused.sharing.findings(), one.sharing.channels[0].name])


def test_requests_survive_a_rolling_restart_under_load(redis: RedisServer, tmp_path: Path) -> None:
    """Both routers are replaced while streams are open.

    Clients use ready routers only, like clients of a Kubernetes service. No stream breaks, no request is refused, and a
    new router starts with the index of a peer.
    """
    config = tmp_path / "config.yaml"

    async def play() -> None:
        async with AsyncExitStack() as stack:
            workers = [stack.enter_context(KvrouterProcess(["simulate", "--step-ms", "40"])) for _ in range(2)]
            urls = [await asyncio.to_thread(worker.wait_until_listening) for worker in workers]
            settings: dict[str, Any] = {
                "workers": [{"url": url} for url in urls],
                "replicas": {"redis": redis.url},
                "server": {"drain_seconds": 1.5},
            }
            config.write_text(yaml.safe_dump(settings))
            pool = Pool(stack, config)
            await pool.add()
            await pool.add()
            session = await stack.enter_async_context(aiohttp.ClientSession())
            stopped, clients = asyncio.Event(), []
            watching = asyncio.create_task(pool.watch(session))
            clients = [asyncio.create_task(client(session, pool, stopped, tokens)) for tokens in (1, 25) * 6]
            await asyncio.sleep(2)
            for _ in range(2):
                old = pool.oldest()
                await pool.add(peer=pool.newest())
                await pool.end(old)
            await asyncio.sleep(1)
            stopped.set()
            answers = [answer for each in await asyncio.gather(*clients) for answer in each]
            await end_tasks([watching])
            assert {problem for problem, _ in answers} == {""}
            assert len({router for _, router in answers}) == 4
            async with session.get(f"{pool.newest()}/workers") as response:
                held = [
                    rank["blocks"]["gpu"] for worker in (await response.json())["workers"] for rank in worker["ranks"]
                ]
            assert all(held)

    asyncio.run(play())


class Pool:
    """Routers that come and go, and which of them are ready."""

    def __init__(self, stack: AsyncExitStack, config: Path) -> None:
        self._stack = stack
        self._arguments = ["serve", "--config", str(config), "--port", "0", "--log-level", "warning"]
        self._routers: dict[str, KvrouterProcess] = {}
        self.ready: list[str] = []

    async def add(self, peer: str | None = None) -> None:
        arguments = [*self._arguments, *(["--peer", peer] if peer else [])]
        process = self._stack.enter_context(KvrouterProcess(arguments))
        self._routers[await asyncio.to_thread(process.wait_until_listening)] = process

    async def end(self, url: str) -> None:
        process = self._routers.pop(url)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 60) == 0

    def oldest(self) -> str:
        return next(iter(self._routers))

    def newest(self) -> str:
        return list(self._routers)[-1]

    async def watch(self, session: aiohttp.ClientSession) -> None:
        """Poll the readiness of all routers, like probes, which detect a stopping router late."""
        while True:
            ready = []
            for url in list(self._routers):
                async with session.get(f"{url}/ready") as response:
                    if response.status == 200:
                        ready.append(url)
            self.ready = ready
            await asyncio.sleep(0.5)


async def client(
    session: aiohttp.ClientSession, pool: Pool, stopped: asyncio.Event, tokens: int
) -> list[tuple[str, str]]:
    """Stream one answer after the other, and return the problem and the router of each."""
    answers = []
    number = 0
    while not stopped.is_set():
        if not pool.ready:
            await asyncio.sleep(0.05)
            continue
        number += 1
        url = pool.ready[number % len(pool.ready)]
        problem = ""
        try:
            async with session.post(f"{url}/v1/completions", json=BODY | {"max_tokens": tokens}) as response:
                text = await response.read()
                if response.status != 200 or not text.rstrip().endswith(b"data: [DONE]"):
                    problem = f"{time.monotonic()}: status {response.status} {text[-200:]!r}"
        except aiohttp.ClientError as error:
            problem = f"{type(error).__name__}: {error}"
        answers.append((problem, url))
    return answers
