from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """One event loop for all tests, so that servers may outlive one."""
    return "asyncio"


@pytest.fixture
async def urls() -> AsyncIterator[list[str]]:
    """Two simulated workers."""
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(running(SimulatedWorkerSettings())) for _ in range(2)]
