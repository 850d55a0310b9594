"""The sides in turn: one router, several that share their load over Redis, and several that do not."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from benchmarks.replicas.load import Answered, Planned, plan, send
from benchmarks.replicas.redis_server import RedisServer
from kvrouter.processes import KvrouterProcess

_WORKER_PROCESSES = 2
_KNOWN_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The load, the number of workers, and the number of routers."""

    workers: int = 16
    routers: int = 4
    seconds: float = 60.0
    rate: float = 24.0


@dataclass(slots=True)
class Side:
    """The results of one side. `seen`: the sharing reports of /health during and after an outage of Redis."""

    name: str
    answers: list[Answered] = field(default_factory=list)
    seen: dict[str, bool] = field(default_factory=dict)

    @property
    def lost(self) -> list[Answered]:
        return [answer for answer in self.answers if answer.problem]


async def run_sides(wanted: Plan, rounds: int = 1) -> list[Side]:
    """Run every side with equal requests on empty caches, `rounds` times in turn."""
    requests = plan(wanted.seconds, wanted.rate)
    alone, single = Side(f"{wanted.routers} routers, each alone"), Side("one router")
    sharing = Side(f"{wanted.routers} routers, sharing")
    broken = Side(f"{wanted.routers} routers, sharing; Redis killed and restarted")
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer())
        workers = [
            url
            for _ in range(_WORKER_PROCESSES)
            for url in stack.enter_context(_workers(wanted.workers // _WORKER_PROCESSES))
        ]
        for _ in range(rounds):
            for side, routers, url in (
                (single, 1, ""),
                (sharing, wanted.routers, redis.url),
                (alone, wanted.routers, ""),
                (broken, wanted.routers, redis.url),
            ):
                await _reset(workers)
                async with _routers(workers, routers, url) as urls:
                    if side is broken:
                        side.answers += await _with_faults(side, requests, urls, redis, wanted.seconds)
                    else:
                        side.answers += await send(requests, urls)
    return [single, sharing, alone, broken]


async def _with_faults(
    side: Side, requests: Sequence[Planned], routers: list[str], redis: RedisServer, seconds: float
) -> list[Answered]:
    """Kill Redis after a third of the time, and restart it after two thirds."""
    sending = asyncio.create_task(send(requests, routers))
    await asyncio.sleep(seconds / 3)
    redis.kill()
    await asyncio.sleep(seconds / 3 - 1)
    side.seen["reported during the outage"] = all([not await _shared(url) for url in routers])
    await asyncio.sleep(1)
    redis.start()
    answers = await sending
    async with asyncio.timeout(_KNOWN_SECONDS):
        while not all([await _shared(url) for url in routers]):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    side.seen["shared again"] = True
    return answers


@asynccontextmanager
async def _routers(workers: Sequence[str], count: int, redis: str) -> AsyncIterator[list[str]]:
    """Run a number of routers, which share their load if there is a Redis."""
    config: dict[str, Any] = {"workers": [{"url": url} for url in workers], "replicas": {"redis": redis}}
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        arguments = ["serve", "--config", str(file), "--port", "0", "--log-level", "error"]
        processes = [stack.enter_context(KvrouterProcess(arguments)) for _ in range(count)]
        urls = [await asyncio.to_thread(process.wait_until_listening) for process in processes]
        async with asyncio.timeout(_KNOWN_SECONDS):
            while redis and not all([await _known(url) == count - 1 for url in urls]):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        yield urls


async def _reset(workers: Sequence[str]) -> None:
    async with aiohttp.ClientSession() as session:
        for url in workers:
            async with session.post(f"{url}/reset_prefix_cache") as response:
                response.raise_for_status()


async def _shared(router: str) -> bool:
    """Return whether a router reports no problem of sharing."""
    async with aiohttp.ClientSession() as session, session.get(f"{router}/health") as response:
        return all(each["finding"] != "load_not_shared" for each in (await response.json())["findings"])


async def _known(router: str) -> int:
    """Return the number of other routers that a router knows."""
    async with aiohttp.ClientSession() as session, session.get(f"{router}/metrics") as response:
        lines = (await response.text()).splitlines()
    [value] = [line.split()[1] for line in lines if line.startswith("kvrouter_sharing_routers ")]
    return int(float(value))


@contextmanager
def _workers(count: int) -> Any:
    command = [sys.executable, "-m", "benchmarks.replicas.workers", str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split()
        finally:
            process.terminate()
