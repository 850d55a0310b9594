"""Generated requests, by both ways in: none reaches a worker in a form that others would read differently."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from random import Random

import pytest
from differential import Comparison
from router_under_test import router
from scripted_worker import scripted_worker

pytestmark = pytest.mark.anyio

# `make fuzz` gives both; a failure names its seed.
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
SEED = int(os.environ.get("FUZZ_SEED", "1"))
FEW = 600
_WARM = 5000  # requests after which memory is not to grow
_AT_ONCE = 8


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_both_ways_and_h11_agree_or_it_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "uvicorn.error")
    quiet = {"probe_interval": 3600, "metrics_interval": 3600}
    ends, before = time.monotonic() + SECONDS, 0
    async with (
        scripted_worker() as worker,
        router(worker.url, fleet=quiet) as fast,
        router(worker.url, fleet=quiet, server={"fast_lane": False}) as asgi,
    ):
        comparison = Comparison(fast.url, asgi.url, worker)
        outcome = comparison.outcome

        async def go_on(random: Random) -> None:
            while time.monotonic() < ends if SECONDS else outcome.requests < FEW:
                await comparison.one(random)

        async def watch_memory() -> None:
            nonlocal before
            while outcome.requests < _WARM and time.monotonic() < ends:  # noqa: ASYNC110 - others count
                await asyncio.sleep(0.1)
            before = resident_bytes()

        await asyncio.gather(watch_memory(), *(go_on(Random(f"{SEED}-{task}")) for task in range(_AT_ONCE)))
        assert await fast.requests_in_flight() == await asgi.requests_in_flight() == 0
    grown = resident_bytes() - before
    assert outcome.passed > outcome.requests / 25  # or else nothing was tried
    assert grown < 64 * 2**20
    print(
        f"seed {SEED}: {outcome.requests} requests, {outcome.passed} reached the worker, statuses {outcome.statuses}, "
        f"memory {grown / 2**20:+.1f} MiB"
    )
