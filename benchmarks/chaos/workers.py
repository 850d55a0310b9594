"""A fleet of real processes: a router, and simulated workers that can be killed, stopped and restarted."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml
from aiohttp import web

from benchmarks.ports import free_port
from kvrouter.processes import KvrouterProcess


class SimulatedWorker:
    """A simulated worker at one address, over several processes."""

    def __init__(self, step_ms: float) -> None:
        self._port = free_port()
        self._options = ["--port", str(self._port), "--step-ms", str(step_ms)]
        self._process = KvrouterProcess(["simulate", *self._options])
        self._refusing: web.AppRunner | None = None
        self.url = f"http://127.0.0.1:{self._port}"

    def wait_until_listening(self) -> None:
        """Wait until the worker answers."""
        self._process.wait_until_listening()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the worker's process."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """End the process and wait for its end."""
        self._process.__exit__(None, None, None)

    async def start_again(self) -> None:
        """Start a new process at the same address, after the previous one ended."""
        if self._refusing:
            await self._refusing.cleanup()
            self._refusing = None
        self._process = KvrouterProcess(["simulate", *self._options])
        await asyncio.to_thread(self.wait_until_listening)

    async def refuse_everything(self) -> None:
        """Answer every request with 503, in place of an ended process."""

        async def refuse(_: web.Request) -> web.Response:
            return web.Response(status=503)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", refuse)
        self._refusing = web.AppRunner(app)
        await self._refusing.setup()
        await web.TCPSite(self._refusing, "127.0.0.1", self._port).start()


class ChaosFleet:
    """Workers and a router in front of them, each in its own process."""

    def __init__(self, workers: int, step_ms: float) -> None:
        self.workers = [SimulatedWorker(step_ms) for _ in range(workers)]
        self.url = ""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for worker in self.workers:
            self._stack.callback(worker.stop)
        for worker in self.workers:
            await asyncio.to_thread(worker.wait_until_listening)
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump({"workers": [{"url": worker.url} for worker in self.workers]}))
        router = self._stack.enter_context(KvrouterProcess(["serve", "--config", str(config), "--port", "0"]))
        self.url = await asyncio.to_thread(router.wait_until_listening)
        self._session = await self._stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10))
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def report(self) -> dict[str, dict[str, Any]]:
        """Return the router's report of its workers, by URL."""
        async with self._session.get(f"{self.url}/workers") as response:
            return {worker["worker"]: worker for worker in (await response.json())["workers"]}

    async def state(self, worker: SimulatedWorker) -> str:
        """Return the state of one worker."""
        return str((await self.report())[worker.url]["state"])

    async def until_used(self, worker: SimulatedWorker, seconds: float = 60) -> None:
        """Wait until a worker receives requests again."""
        async with asyncio.timeout(seconds):
            while await self.state(worker) not in ("ready", "warming", "half_open"):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def left_over(self) -> int:
        """Return the number of reservations on all workers."""
        report = await self.report()
        loads = [rank["load"] for worker in report.values() for rank in worker["ranks"]]
        reserved: int = sum(sum(load.values()) for load in loads)
        return reserved + sum(int(worker["requests_in_flight"]) for worker in report.values())
