"""A connection that is accepted in the moment its server is closed is closed too, on the loops of tests."""

from __future__ import annotations

import asyncio
import gc
import socket
import warnings

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
