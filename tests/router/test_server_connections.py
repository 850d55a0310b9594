"""A server that stops tells its connections, those too that are accepted meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from router.server.http_server import Connections

pytestmark = pytest.mark.anyio


async def test_a_connection_that_comes_too_late_is_told_to_end() -> None:
    told: list[str] = []

    class Connection:
        def shutdown(self) -> None:
            told.append("shutdown")

    connections, early, late = Connections(), Connection(), Connection()
    connections.add(early)
    connections.stopping = True
    connections.add(late)
    assert connections == {early, late}
    await asyncio.sleep(0)
    assert told == ["shutdown"]
