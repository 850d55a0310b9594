"""Simulated workers on the event loop of the test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

# Settings of workers whose prefill and decode take nearly no time.
FAST: dict[str, Any] = {"base_step_s": 0.001, "prefill_s_per_token": 0.0, "decode_s_per_sequence": 0.0}


@asynccontextmanager
async def simulated_workers(count: int, **settings: Any) -> AsyncIterator[list[str]]:
    """Run workers with the same settings, fast ones by default, and yield their URLs."""
    async with AsyncExitStack() as stack:
        each = SimulatedWorkerSettings(**FAST | settings)
        yield [await stack.enter_async_context(running(each)) for _ in range(count)]
