"""Generated requests, over sockets and in the process: none reaches a worker in an ambiguous form."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import structlog
from budget import SECONDS, SEED
from differential import Comparison, Outcome
from recording_worker import RecordingWorker
from router_under_test import PATIENT, serving
from ways import InProcess, OverSockets

from router.app.app import running_router
from router.server.http_server import HttpServer
from router.settings import Settings

FEW = 2000
_WARM = 20_000  # requests after which memory is not to grow
_AT_ONCE = 32
_RETRIES = {"retry_share": 1_000_000}
# The worker stays in use, although it refuses many requests and closes their connections.
_QUIET = {"probe_interval": 3600, "metrics_interval": 3600, "failures": 1_000_000, **PATIENT}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop that routers run on."""
    return "asyncio", {"use_uvloop": True}


@asynccontextmanager
async def ways_in(worker: RecordingWorker) -> AsyncIterator[tuple[InProcess, OverSockets]]:
    """A router in front of a worker, and the ways to it."""
    await worker.start()
    settings = Settings(workers=[{"url": worker.url}], fleet=_QUIET, proxy=_RETRIES)  # type: ignore[arg-type, list-item]
    try:
        async with running_router(settings) as app, serving(HttpServer(app, shutdown_timeout=1)) as url:
            yield InProcess(app, worker), OverSockets(url, worker)
    finally:
        await worker.stop()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _Memory:
    """The resident memory at the start, after warm-up, and in the middle of a run."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.start = self.middle = 0

    def look(self, generated: int) -> None:
        if not self.start and generated > _WARM:
            self.start = resident_bytes()
        elif not self.middle and time.monotonic() > self._began + SECONDS / 2:
            self.middle = resident_bytes()


def _print_outcome(outcome: Outcome, memory: _Memory) -> None:
    sizes = " ".join(f"{size / 2**20:.0f}" for size in (memory.start, memory.middle, resident_bytes()))
    print(f"seed {SEED}: {outcome}; MiB resident at the start, in the middle and at the end: {sizes}")


async def test_forwarded_requests_mean_the_same_to_h11() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    ends, memory = time.monotonic() + SECONDS, _Memory()
    async with ways_in(RecordingWorker()) as (in_process, over_sockets):
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        comparison = Comparison([in_process], [over_sockets])
        outcome = comparison.outcome

        async def send_until_done(random: Random) -> None:
            while time.monotonic() < ends if SECONDS else outcome.generated < FEW:
                await comparison.several(random)
                memory.look(outcome.generated)

        try:
            async with asyncio.TaskGroup() as tasks:
                for task in range(_AT_ONCE):
                    tasks.create_task(send_until_done(Random(f"{SEED}-{task}")))
        finally:
            _print_outcome(outcome, memory)
        assert await over_sockets.requests_in_flight() == 0
    assert outcome.passed > outcome.sent / 10  # or else nothing was tried
    assert outcome.failed == 0
    assert not memory.start or resident_bytes() - memory.start < 64 * 2**20
