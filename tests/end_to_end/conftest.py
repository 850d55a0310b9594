"""Fixtures of the end-to-end tests: the event loop, workers and routers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from router_under_test import RouterUnderTest, router
from scripted_worker import ScriptedWorker, scripted_worker

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running


@pytest.fixture
async def urls() -> AsyncIterator[list[str]]:
    """Two simulated workers."""
    async with running(SimulatedWorkerSettings()) as one, running(SimulatedWorkerSettings()) as two:
        yield [one, two]


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    """A scripted worker."""
    async with scripted_worker() as worker:
        yield worker


@pytest.fixture
async def routed(worker: ScriptedWorker) -> AsyncIterator[RouterUnderTest]:
    """A router in front of the scripted worker."""
    async with router(worker.url) as routed:
        yield routed
