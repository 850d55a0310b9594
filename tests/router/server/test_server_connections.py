"""Many connections at once, and connections that arrive while a server starts or stops."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import uvloop
from waiting import until

from indexer import Indexer
from router.fleet.allowed_networks import AllowedNetworks
from router.fleet.event_streams import RegisteredStreams
from router.server.http_server import Connections, HttpServer
from router.server.serving import index_app
from router.server.sockets import listen
from router.settings import Settings
from router.tokens.tokenizers import Tokenizers

_CLIENTS = 64


@contextmanager
def http_server() -> Iterator[HttpServer]:
    """A server of an index that holds nothing."""
    indexer = Indexer()
    indexer.start()
    try:
        app = index_app(Settings(), indexer, Tokenizers(), RegisteredStreams(indexer, AllowedNetworks([])))
        yield HttpServer(app, shutdown_timeout=1)
    finally:
        indexer.stop()


def test_concurrent_connections_wait_for_few_loop_turns() -> None:
    with http_server() as server:
        uvloop.run(_clients_come_at_once(server))


async def _clients_come_at_once(server: HttpServer) -> None:
    listening = listen("127.0.0.1", 0)
    address = listening.getsockname()
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    async with asyncio.timeout(60):
        await until(lambda: server.started)
        with ExitStack() as clients:
            for _ in range(_CLIENTS):  # while the server does not accept
                clients.enter_context(socket.create_connection(address))
            turns = 0
            while len(server.server_state.connections) < _CLIENTS:
                await asyncio.sleep(0)
                turns += 1
        server.should_exit = True
        await serving
    assert turns < _CLIENTS / 2
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


def test_early_connection_is_served() -> None:
    with http_server() as server:
        asyncio.run(_one_comes_early(server))  # whose servers begin one turn after the other


async def _one_comes_early(server: HttpServer) -> None:
    listening = listen("127.0.0.1", 0)
    async with asyncio.timeout(60):
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        answer = await reader.read()
        writer.close()
        server.should_exit = True
        await serving
    assert b"\r\ndate: " in answer


async def test_late_connection_is_closed() -> None:
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
