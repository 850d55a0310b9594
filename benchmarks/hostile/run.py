"""One run: customers' requests beside hostile clients and workers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import openai

from benchmarks.chaos.workers import SimulatedWorker
from benchmarks.hostile.hostile_process import hostile_process
from benchmarks.machine import CORES, pin
from benchmarks.ports import free_port
from benchmarks.proxy.processes import answers, started
from benchmarks.proxy.sides import ROUTER_CORE

PROMPTS = 200
_WORDS = ["river", "stone", "cloud", "market", "winter", "letter", "garden", "engine", "paper", "window"]
_THINKING = 0.2  # mean seconds between two requests of one client


@dataclass
class Service:
    """The results of clients: seconds to the first part of an answer, and errors."""

    seconds: list[float] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)

    def quantile(self, share: float) -> float:
        """Return the seconds within which this share of the requests was answered."""
        ordered = sorted(self.seconds)
        return ordered[min(int(share * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


async def customers(url: str, count: int, until: float, random: Random) -> Service:
    """Run `count` clients until `until` on the monotonic clock."""
    service = Service()
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        await asyncio.gather(*(_one(client, service, until, Random(random.random())) for _ in range(count)))
    return service


async def _one(client: openai.AsyncOpenAI, service: Service, until: float, random: Random) -> None:
    while time.monotonic() < until:
        await asyncio.sleep(random.expovariate(1 / _THINKING))
        begun = time.monotonic()
        try:
            service.seconds.append(await _first_part(client, random) - begun)
        except openai.APIStatusError as error:
            service.lost[f"status {error.status_code}"] += 1
        except openai.APIError as error:
            service.lost[type(error).__name__] += 1


async def _first_part(client: openai.AsyncOpenAI, random: Random) -> float:
    """Send a request, read the whole answer, and return the time of its first part."""
    words = Random(random.randrange(PROMPTS)).choices(_WORDS, k=200)
    stream = await client.chat.completions.create(
        model="simulated",
        messages=[{"role": "system", "content": " ".join(words)}, {"role": "user", "content": "go on"}],
        max_tokens=random.randint(4, 40),
        stream=True,
    )
    first = 0.0
    async for _ in stream:
        first = first or time.monotonic()
    return first


WORKERS = 3
CUSTOMERS = 8
_CALM_SHARE = 0.2  # share of the time without hostile clients
_BODY_TIMEOUT = 5.0
_QUIET_SECONDS = 20.0
_MOST_GROWTH = 0.10  # growth of resident memory from the middle of the hostile time to its end
_MOST_SLOWER = 1.5


@dataclass(slots=True)
class Result:
    """The results of a run. `statuses`: answers to intruders. `left`: the router's objects at the end."""

    minutes: float
    calm: Service
    before: dict[str, int]
    among: Service = field(default_factory=Service)
    statuses: Counter[int] = field(default_factory=Counter)
    events: int = 0
    samples: list[dict[str, int]] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)

    @property
    def slower(self) -> float:
        """The customers' 99th percentile among hostile clients, as a multiple of that without."""
        return self.among.quantile(0.99) / self.calm.quantile(0.99)

    @property
    def growth(self) -> float:
        """The growth of resident memory in the second half."""
        sizes = [sample["bytes"] for sample in self.samples]
        quarter = len(sizes) // 4
        return median(sizes[-quarter:]) / median(sizes[2 * quarter : 3 * quarter]) - 1 if quarter else 0.0

    def problems(self) -> list[str]:
        """Return the problems of the run."""
        found = [f"customers lost {count} requests: {name}" for name, count in self.among.lost.items()]
        if self.statuses[500]:
            found.append(f"{self.statuses[500]} answers with 500")
        for name in ("exchanges", "placements", "reservations", "upstream legs", "upstream connections"):
            if self.left[name]:
                found.append(f"{self.left[name]} {name} are left")
        if self.left["tasks"] > self.before["tasks"]:
            found.append(f"{self.left['tasks']} tasks, {self.before['tasks']} before")
        if self.left["files"] > self.before["files"] + 4 * WORKERS:
            found.append(f"{self.left['files']} open files, {self.before['files']} before")
        if self.growth > _MOST_GROWTH:
            found.append(f"memory grew by {self.growth:.0%} in the second half")
        if self.slower > _MOST_SLOWER:
            found.append(f"the customers' 99th percentile is {self.slower:.2f} times what it is without")
        return found


class _Router:
    """A reader of the objects in the router's process."""

    def __init__(self, pid: int, reports: Path) -> None:
        self._pid = pid
        self._reports = reports
        self._asked = 0

    async def holds(self) -> dict[str, int]:
        """Return the number of objects of each kind, tasks, sockets and open files, and bytes."""
        os.kill(self._pid, signal.SIGUSR1)
        self._asked += 1
        async with asyncio.timeout(60):
            while not self._reports.exists() or len(lines := self._reports.read_text().splitlines()) < self._asked:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        holds: dict[str, int] = json.loads(lines[-1])
        return holds


async def run(minutes: float) -> Result:
    """Run everything in about `minutes` minutes."""
    pin(*(core for core in CORES if core != ROUTER_CORE or len(CORES) == 1))
    random = Random(7)
    good = [SimulatedWorker(step_ms=2.0) for _ in range(WORKERS)]
    try:
        for worker in good:
            await asyncio.to_thread(worker.wait_until_listening)
        async with hostile_process(seed=7) as hostile:
            with tempfile.TemporaryDirectory(prefix="hostile-") as name:
                folder, port = Path(name), free_port()
                settings = {
                    "server": {"port": port, "body_timeout": _BODY_TIMEOUT, "token": "operator"},
                    "proxy": {"client_timeout": 5.0},
                    "workers": [*({"url": worker.url} for worker in good), *hostile.workers],
                }
                config, reports = folder / "config.yaml", folder / "reports"
                config.write_text(json.dumps(settings))
                command = [sys.executable, "-m", "benchmarks.soak.router", str(config), str(reports)]
                url = f"http://127.0.0.1:{port}"
                with started(command, ROUTER_CORE, folder / "router.log", lambda: answers(f"{url}/health")) as pid:
                    router = _Router(pid, reports)
                    calm_ends = time.monotonic() + minutes * 60 * _CALM_SHARE
                    calm = await customers(url, CUSTOMERS, calm_ends, random)
                    result = Result(minutes, calm, await _once_quiet(router, _BODY_TIMEOUT))
                    ends = time.monotonic() + minutes * 60 * (1 - _CALM_SHARE)
                    sampling = asyncio.create_task(_sample(router, result, ends))
                    result.among, (result.statuses, result.events) = await asyncio.gather(
                        customers(url, CUSTOMERS, ends, random), hostile.attack(url, ends)
                    )
                    await sampling
                    result.left = await _once_quiet(router, _QUIET_SECONDS)
                    return result
    finally:
        for worker in good:
            worker.stop()


async def _once_quiet(router: _Router, seconds: float) -> dict[str, int]:
    await asyncio.sleep(seconds)
    return await router.holds()


async def _sample(router: _Router, result: Result, ends: float) -> None:
    while time.monotonic() < ends:
        await asyncio.sleep(5)
        result.samples.append(await router.holds())
