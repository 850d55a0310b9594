"""Generated requests, by both ways in: none reaches a worker in a form that others would read differently."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from random import Random

import pytest
import structlog
from budget import SECONDS, SEED
from differential import Comparison
from recording_worker import RecordingWorker
from router_under_test import router

pytestmark = pytest.mark.anyio

FEW = 4000
_WARM = 20_000  # requests after which memory is not to grow
_AT_ONCE = 32


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """The loop that routers run on."""
    return "asyncio", {"use_uvloop": True}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_both_ways_and_h11_agree_or_it_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "uvicorn.error")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    quiet = {"probe_interval": 3600, "metrics_interval": 3600}
    ends, before = time.monotonic() + SECONDS, 0
    workers = [RecordingWorker(), RecordingWorker()]
    try:
        for worker in workers:
            await worker.start()
        async with (
            router(workers[0].url, fleet=quiet) as fast,
            router(workers[1].url, fleet=quiet, server={"fast_lane": False}) as asgi,
        ):
            comparison = Comparison([(fast.url, workers[0]), (asgi.url, workers[1])])
            outcome = comparison.outcome

            async def go_on(random: Random) -> None:
                nonlocal before
                while time.monotonic() < ends if SECONDS else outcome.requests < FEW:
                    await comparison.several(random)
                    if not before and outcome.requests > _WARM:
                        before = resident_bytes()

            await asyncio.gather(*(go_on(Random(f"{SEED}-{task}")) for task in range(_AT_ONCE)))
            assert await fast.requests_in_flight() == await asgi.requests_in_flight() == 0
    finally:
        for worker in workers:
            await worker.stop()
    grown = resident_bytes() - before if before else 0
    assert outcome.passed > outcome.requests / 10  # or else nothing was tried
    print(
        f"seed {SEED}: {outcome.requests} requests over {outcome.connections} connections, {outcome.passed} reached "
        f"workers, statuses {outcome.statuses}, memory {grown / 2**20:+.1f} MiB"
    )
    assert grown < 64 * 2**20
