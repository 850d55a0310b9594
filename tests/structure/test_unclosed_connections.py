"""Connections and requests of ours: none stays open, and none follows a redirect."""

from __future__ import annotations

import ast
import asyncio
import gc
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.mark.parametrize("steps", range(5))
def test_connection_accepted_while_the_server_closes_is_closed(steps: int) -> None:
    made: list[asyncio.StreamWriter] = []

    async def accept_and_close() -> None:
        server = await asyncio.start_server(lambda _, writer: made.append(writer), "127.0.0.1", 0)
        with socket.create_connection(server.sockets[0].getsockname()):
            for _ in range(steps):
                await asyncio.sleep(0)
            server.close()
            for _ in range(3):  # its transport, its connection
                await asyncio.sleep(0)
            for writer in made:
                writer.close()
                await writer.wait_closed()

    with warnings.catch_warnings(record=True) as recorded:
        warnings.simplefilter("always")
        asyncio.run(accept_and_close())
        made.clear()
        gc.collect()
    assert [str(each.message) for each in recorded] == []


ROOT = Path(__file__).parents[2]


def sessions() -> Iterator[tuple[str, bool]]:
    """Yield the place of every session, and whether it refuses redirects."""
    for package in ("indexer", "router", "kvrouter"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "aiohttp.ClientSession":
                    refuses = any(
                        keyword.arg == "middlewares" and "refuse_redirects" in ast.unparse(keyword.value)
                        for keyword in node.keywords
                    )
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", refuses


def test_every_session_refuses_redirects() -> None:
    found = dict(sessions())
    assert len(found) > 5
    assert [place for place, refuses in found.items() if not refuses] == []
