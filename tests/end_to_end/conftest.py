from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """One event loop for all tests, so that servers may outlive one."""
    return "asyncio"
