"""Every run tries the same examples, so that a run says something about the change it tests.

`pytest --hypothesis-profile=default` looks for new ones.
"""

from __future__ import annotations

import gc
import socket
import subprocess
from asyncio.selector_events import BaseSelectorEventLoop
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from fork_server import ForkedPopen
from hypothesis import HealthCheck, settings

from router.forwarding import proxied_request

# The speed of a busy machine is no health of a test.
settings.register_profile("repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
subprocess.Popen = ForkedPopen  # type: ignore[misc]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without garbage collection, and exempt from it what they import, which stays until the end.

    Collections would otherwise look through all modules again and again: a tenth of the suite's CPU time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what compiled classes do not allow, where they are compiled."""
    if not str(proxied_request.__file__).endswith(".py"):
        for item in items:
            if item.get_closest_marker("derives"):
                item.add_marker(pytest.mark.skip("compiled classes are not derived from"))


_accept = BaseSelectorEventLoop._accept_connection2  # type: ignore[attr-defined]


async def _accept_or_close(
    loop: Any,
    protocol_factory: Any,
    accepted: socket.socket,
    extra: Any,
    tls: Any = None,
    server: Any = None,
    *more: Any,
) -> None:
    """Accept a connection as asyncio does, and close it if its server has been closed meanwhile.

    Python 3.11 leaks such a connection, which causes a warning in a later test (gh-109564).
    """
    if server is not None and not server.is_serving():
        accepted.close()
    else:
        await _accept(loop, protocol_factory, accepted, extra, tls, server, *more)


BaseSelectorEventLoop._accept_connection2 = _accept_or_close  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Use one event loop for all tests, so that servers can outlive a test."""
    return "asyncio"


@pytest.fixture
def started_by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start commands as users do, without the fork server."""
    monkeypatch.setattr(ForkedPopen, "enabled", False)


@pytest.fixture(autouse=True)
def logging_reset() -> Iterator[None]:
    """Reset the logging that a command set up in this process."""
    yield
    structlog.reset_defaults()
