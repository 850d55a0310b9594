"""The run: the router's capacity, then half of it for minutes while workers fail, and a check of what remains."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp

from benchmarks.chaos.workers import SimulatedWorker
from benchmarks.ports import free_port
from benchmarks.proxy.processes import answers, started
from benchmarks.proxy.sides import ROUTER_CORE
from benchmarks.soak.clients import Clients

WORKERS = 3
BODY_TIMEOUT = 3.0
_FAULT_SECONDS = 15.0
_MAX_RATE = 400.0
_QUIET_SECONDS = 20.0
# growth of resident memory from the middle of a run to its end, when caches are full
_GROWTH = 0.05


@dataclass(slots=True)
class Result:
    """The results of a run. `left` has the router's objects after all clients."""

    seconds: float = 0.0
    capacity: float = 0.0
    rate: float = 0.0
    faults: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    before: dict[str, int] = field(default_factory=dict)
    samples: list[dict[str, int]] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    reserved: int = 0

    def problems(self) -> list[str]:
        """Return the problems of the run."""
        found = [f"{name}: {count}" for name, count in self.outcomes.items() if "NO END" in name]
        for name in ("clients", "exchanges", "placements", "reservations", "upstream legs", "upstream connections"):
            if self.left[name]:
                found.append(f"{self.left[name]} {name} are left")
        if self.left["tasks"] > self.before["tasks"]:
            found.append(f"{self.left['tasks']} tasks, {self.before['tasks']} before")
        if self.left["sockets"] > self.before["sockets"] + 2 * WORKERS:
            found.append(f"{self.left['sockets']} sockets, {self.before['sockets']} before")
        if self.reserved:
            found.append(f"{self.reserved} still reserved on workers")
        if self.growth > _GROWTH:
            found.append(f"memory grew by {self.growth:.0%} in the second half")
        return found

    @property
    def growth(self) -> float:
        """The growth of resident memory in the second half."""
        sizes = [sample["bytes"] for sample in self.samples]
        quarter = len(sizes) // 4
        if not quarter:
            return 0.0
        return median(sizes[-quarter:]) / median(sizes[2 * quarter : 3 * quarter]) - 1


class Soak:
    """A router in front of simulated workers, with load and faults."""

    def __init__(self, url: str, pid: int, reports: Path, workers: list[SimulatedWorker]) -> None:
        self.url = url
        self._pid = pid
        self._reports = reports
        self._workers = workers
        self._random = Random(5)
        self._lines = 0

    async def run(self, minutes: float) -> Result:
        """Run capacity, load, faults and samples."""
        result = Result(seconds=minutes * 60)
        result.capacity = await self._capacity(min(10.0, result.seconds / 4))
        result.rate = min(result.capacity / 2, _MAX_RATE)
        await asyncio.sleep(BODY_TIMEOUT + 6)
        result.before = await self._holds()
        clients = Clients(self.url, self._random)
        end = time.monotonic() + result.seconds
        running = asyncio.create_task(self._load(clients, result.rate, end))
        faults = asyncio.create_task(self._faults(result, end))
        while not running.done():
            await asyncio.sleep(max(result.seconds / 60, 1.0))
            result.samples.append(await self._holds())
        await asyncio.gather(running, faults)
        result.outcomes = clients.outcomes
        await asyncio.sleep(_QUIET_SECONDS)
        result.left = await self._holds()
        result.reserved = await self._reserved()
        return result

    async def _capacity(self, seconds: float) -> float:
        """Return whole requests a second, when `clients` clients send one after another."""
        clients = Clients(self.url, Random(1))
        end = time.monotonic() + seconds

        async def ask() -> None:
            while time.monotonic() < end:
                await clients.one()

        await asyncio.gather(*(ask() for _ in range(64)))
        return clients.outcomes.total() / seconds

    async def _load(self, clients: Clients, rate: float, end: float) -> None:
        """Start new clients at a steady rate, independent of earlier ones."""
        tasks: set[asyncio.Task[None]] = set()
        due = time.monotonic()
        while due < end:
            task = asyncio.create_task(clients.one())
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            due += 1 / rate
            await asyncio.sleep(max(due - time.monotonic(), 0))
        await asyncio.gather(*tasks)

    async def _faults(self, result: Result, end: float) -> None:
        """Kill and restart one worker after another, or suspend it for a while."""
        while time.monotonic() + _FAULT_SECONDS < end:
            await asyncio.sleep(_FAULT_SECONDS / 2)
            worker = self._workers[result.faults % len(self._workers)]
            result.faults += 1
            if result.faults % 2:
                worker.signal(signal.SIGKILL)
                worker.stop()
                await asyncio.sleep(2)
                await worker.start_again()
            else:
                worker.signal(signal.SIGSTOP)
                await asyncio.sleep(3)
                worker.signal(signal.SIGCONT)

    async def _holds(self) -> dict[str, int]:
        """Return the router's objects now."""
        os.kill(self._pid, signal.SIGUSR1)
        self._lines += 1
        async with asyncio.timeout(60):
            while not self._reports.exists() or len(lines := self._reports.read_text().splitlines()) < self._lines:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        holds: dict[str, int] = json.loads(lines[-1])
        return holds

    async def _reserved(self) -> int:
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}/workers") as response:
            report: list[dict[str, Any]] = (await response.json())["workers"]
        loads = [rank["load"] for worker in report for rank in worker["ranks"]]
        return sum(sum(load.values()) for load in loads)


@asynccontextmanager
async def soaking() -> AsyncIterator[Soak]:
    """Run a router in its own process in front of simulated workers."""
    workers = [SimulatedWorker(step_ms=2.0) for _ in range(WORKERS)]
    try:
        for worker in workers:
            await asyncio.to_thread(worker.wait_until_listening)
        with tempfile.TemporaryDirectory(prefix="soak-") as name:
            folder, port = Path(name), free_port()
            settings = {
                "server": {"port": port, "body_timeout": BODY_TIMEOUT},
                "workers": [{"url": worker.url} for worker in workers],
            }
            config, reports = folder / "config.yaml", folder / "reports"
            config.write_text(json.dumps(settings))
            command = [sys.executable, "-m", "benchmarks.soak.router", str(config), str(reports)]
            url = f"http://127.0.0.1:{port}"
            with started(command, ROUTER_CORE, folder / "router.log", lambda: answers(f"{url}/ready")) as pid:
                yield Soak(url, pid, reports, workers)
    finally:
        for worker in workers:
            worker.stop()
