"""uvicorn's server with connections of our own: it drains them and stops in time, by SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from router.http.unparsed import RecentHeads
from router.server.http_connection import HttpConnection
from router.server.logs import say

# Connections that are accepted in one turn of the event loop. libuv accepts one per listening socket and turn, and a
# turn is long under load.
_ACCEPTED_A_TURN = 16
# Longer than clients and load balancers keep an idle connection: a request on a closing connection would be lost.
KEEP_ALIVE_SECONDS = 75
# How long the application may take to close when a second signal ends the server.
_FORCED_CLOSE_SECONDS = 2.0


class HttpServer(uvicorn.Server):
    """A server of an application and its dispatcher, `app.state.dispatcher`."""

    def __init__(
        self, app: FastAPI, shutdown_timeout: float, certificate: Path | None = None, key: Path | None = None
    ) -> None:
        """Create a server. `shutdown_timeout`: the seconds that requests in flight have when it stops."""
        config = uvicorn.Config(
            app,
            http=partial(HttpConnection, app.state.dispatcher, RecentHeads()),  # type: ignore[arg-type]
            ssl_certfile=certificate,
            ssl_keyfile=key,
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            log_config=None,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(shutdown_timeout),
        )
        super().__init__(config)
        self._announces = False
        self._connections = self.server_state.connections = Connections()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Raises OSError."""
        if sockets is not None:
            sockets = [each.dup() for each in sockets for _ in range(_ACCEPTED_A_TURN)]  # their servers close them
        await self.on_tick(0)  # the first sockets are served before the last listen: with the headers of all answers
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the requests in flight, after ending the streams that have no end."""
        if end := getattr(self.config.app.state, "on_shutdown", None):  # type: ignore[union-attr]
            await end(self.config.timeout_graceful_shutdown or 0)
        self._connections.stopping = True
        if self._announces:
            requests, seconds = self._connections.answering(), self.config.timeout_graceful_shutdown
            say(f"stopping: waits for {requests} requests in flight, {seconds} s at most; a second signal ends them")
        await super().shutdown(sockets)
        if self._announces and (left := self._connections.answering()):
            say(f"stopped: {left} requests were broken off")
        if self.force_exit:  # uvicorn leaves the application open then, and its cancellation prints a traceback
            with suppress(TimeoutError):
                async with asyncio.timeout(_FORCED_CLOSE_SECONDS):
                    await self.lifespan.shutdown()

    def announce(self) -> None:
        """Print what the end of this server waits for."""
        self._announces = True

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # uvicorn would raise them again at its end, before ours

    def drain(self) -> None:
        """Ask clients to open new connections: every response closes its connection from now on."""
        self.config.encoded_headers.append((b"connection", b"close"))
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]


class Connections(set[Any]):
    """The connections of a server. One that is accepted while it stops is shut down, because the server would wait."""

    stopping = False

    def answering(self) -> int:
        """Return the number of connections whose request is not answered yet."""
        return sum(each.answering for each in self if isinstance(each, HttpConnection))

    def add(self, connection: Any) -> None:
        super().add(connection)
        if self.stopping:
            asyncio.get_running_loop().call_soon(connection.shutdown)


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stopped_by_signals(server: HttpServer, app: FastAPI, drain_seconds: float) -> Iterator[Callable[[], None]]:
    """Stop a server by signals. Yields the handler of SIGTERM.

    - SIGINT stops it.
    - SIGTERM stops it after it has drained.
    - A second signal of either kind stops it at once, without waiting for requests.
    """
    loop = asyncio.get_running_loop()
    signalled = False

    server.announce()

    def stop() -> None:
        server.should_exit = True

    def is_first() -> bool:
        """Return whether this is the first signal. A later one stops the server at once."""
        nonlocal signalled
        first, signalled = not signalled, True
        if not first:
            server.force_exit = True
            stop()
        return first

    def interrupt() -> None:
        if is_first():
            stop()

    def drain() -> None:
        if not is_first():
            return
        readiness = getattr(app.state, "readiness", None)
        if readiness is None or not drain_seconds:
            stop()
            return
        readiness.stopping = True
        server.drain()
        loop.call_later(drain_seconds, stop)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, drain)
    try:
        yield drain
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


class SignalWaiter:
    """Receives signals without an event loop. `readable`: a socket to wait for; `last`: the last signal."""

    def __init__(self) -> None:
        self.last: int | None = None
        self.readable, self._writable = socket.socketpair()

    def __enter__(self) -> SignalWaiter:
        for each in (self.readable, self._writable):
            each.setblocking(False)
        self._handlers_before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self.readable.close()
        self._writable.close()

    def forget(self) -> None:
        """Forget the last signal."""
        self.last = None
        while True:
            try:
                self.readable.recv(64)
            except BlockingIOError:
                return

    def _note(self, number: int, _: object) -> None:
        self.last = number
        self._writable.send(b"!")
