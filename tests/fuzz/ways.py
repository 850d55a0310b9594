"""The ways in to a router: over sockets, or straight into its protocol, which reads and answers the same bytes.

A connection in the process costs a tenth of one over a socket. There the bytes come in several pieces too.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from recording_worker import RecordingWorker
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from indexer.errors import RequestError, error_body, error_headers
from router.forwarding.proxy import Proxy, ProxyContext
from router.forwarding.request_context import ContextMiddleware, context_of
from router.server.http_server import HttpServer

_ANSWER_SECONDS = 30.0
_QUIET_SECONDS = 0.5
# In the process it is quiet after so many rounds of the loop without an answer: a clock goes on where a loop stands.
_QUIET_ROUNDS = 20
_ROUND_SECONDS = 0.01
_PIECES = 8


class OverSockets:
    """Connections to a router at a URL."""

    def __init__(self, url: str, worker: RecordingWorker) -> None:
        self.worker = worker
        self._url = urlsplit(url)

    async def answers(self, data: bytes, random: Random, half_close: bool, done: Callable[[bytes], bool]) -> bytes:  # noqa: ARG002
        """All that comes back over a connection with this data, until the router closes it.

        `half_close`: say at once that nothing more follows. Else it is said once nothing comes any more and what came
        is enough, by `done`: who closes first leaves a port behind that is taken for a minute.
        """
        transport, client = await asyncio.get_running_loop().create_connection(
            lambda: _Client(data, half_close, done), self._url.hostname, self._url.port
        )
        try:
            return await _in_time(client.closed, data)
        finally:
            transport.abort()

    async def requests_in_flight(self) -> int:
        """As the router tells."""
        ask = b"GET /workers HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n"
        answer = await self.answers(ask, Random(0), False, bool)
        (worker,) = json.loads(answer.partition(b"\r\n\r\n")[2])["workers"]
        return sum(rank["load"]["requests"] for rank in worker["ranks"])


class _Client(asyncio.Protocol):
    """Sends a connection's requests, and reads the answers until the other side closes it."""

    def __init__(self, data: bytes, half_close: bool, done: Callable[[bytes], bool]) -> None:
        self._data = data
        self._half_close = half_close
        self._done = done
        self._came: list[bytes] = []
        self.closed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        transport.write(self._data)
        if self._half_close:
            transport.write_eof()
        else:
            self._wait()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(_QUIET_SECONDS, self._say_the_end)

    def _say_the_end(self) -> None:
        if self._transport.is_closing():
            return
        if self._done(b"".join(self._came)):
            self._transport.write_eof()
        else:
            self._wait()

    def data_received(self, data: bytes) -> None:
        self._came.append(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self._half_close:
            self._timer.cancel()
        if not self.closed.done():
            self.closed.set_result(b"".join(self._came))


class _DoorAndProxy:
    """A router's application without its own endpoints, which are asked over sockets: these it answers with nothing."""

    def __init__(self, app: FastAPI) -> None:
        self.state = app.state
        proxy_context: ProxyContext = app.state.proxy_context
        self._proxy = Proxy(proxy_context)
        self._whole = ContextMiddleware(self._dispatch, proxy_context.contexts, proxy_context.settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._whole(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not context_of(scope).admitted.route.own:
            await self._proxy(scope, receive, send)
            return
        status, headers, body = 200, [(b"content-length", b"0")], b""
        try:
            while (await receive()).get("more_body"):
                pass
        except RequestError as error:
            body = error_body(error)
            status, headers = error.status, error_headers(error, body)
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class InProcess:
    """Connections that are none: to the protocol of a server, whose application is the proxy."""

    def __init__(self, app: FastAPI, worker: RecordingWorker) -> None:
        self.worker = worker
        config: Any = HttpServer(_DoorAndProxy(app), shutdown_timeout=1).config  # type: ignore[arg-type]
        config.load()
        self._protocol = partial(config.http_protocol_class, config=config, server_state=ServerState(), app_state={})

    async def answers(self, data: bytes, random: Random, half_close: bool, done: Callable[[bytes], bool]) -> bytes:
        """As over a socket, of data that comes in pieces."""
        pieces = [data]
        if random.random() < 0.2:
            places = sorted(random.randrange(len(data) + 1) for _ in range(random.randrange(1, _PIECES)))
            pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
        transport = _Memory(self._protocol(), pieces, half_close, done)
        try:
            return await _in_time(transport.closed, data)
        finally:
            transport.abort()


class _StillThere:
    """What is asked of the socket of a client that reads on."""

    def getsockopt(self, *_: int) -> bytes:
        return b"\1"  # established

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 80

    getpeername = getsockname


class _Memory(asyncio.Transport):
    """A transport of bytes that are there already. What is written to it is kept."""

    def __init__(
        self, protocol: Any, pieces: list[bytes], half_close: bool, done: Callable[[bytes], bool]
    ) -> None:
        super().__init__({"socket": _StillThere()})
        self._loop = asyncio.get_running_loop()
        self._protocol = protocol
        self._pieces = [piece for piece in reversed(pieces) if piece]
        self._done = done
        self._came: list[bytes] = []
        self._half_close = half_close
        self._paused = self._closing = self._ended = False
        self.closed: asyncio.Future[bytes] = self._loop.create_future()
        protocol.connection_made(self)
        self._quiet = 0
        self._timer = self._loop.call_later(_ROUND_SECONDS, self._listen)
        self._feed()

    def _feed(self) -> None:
        if self._pieces and not self._paused and not self._closing:
            self._protocol.data_received(self._pieces.pop())
            self._loop.call_soon(self._feed)
        elif self._half_close and not self._pieces and not self._closing and not self._ended:
            self._end()

    def _listen(self) -> None:
        if self._ended:
            return
        self._quiet += 1
        if self._quiet < _QUIET_ROUNDS or self._pieces or not self._done(b"".join(self._came)):
            self._timer = self._loop.call_later(_ROUND_SECONDS, self._listen)
        else:
            self._end()

    def _end(self) -> None:
        self._ended = True
        if not self._protocol.eof_received():
            self.close()

    def write(self, data: Any) -> None:
        if not self._closing:
            self._quiet = 0
            self._came.append(bytes(data))

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._timer.cancel()
            self._loop.call_soon(self._lost)

    abort = close

    def _lost(self) -> None:
        self._protocol.connection_lost(None)
        if not self.closed.done():
            self.closed.set_result(b"".join(self._came))

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._loop.call_soon(self._feed)

    def get_write_buffer_size(self) -> int:
        return 0


async def _in_time(closed: asyncio.Future[bytes], data: bytes) -> bytes:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await closed
    except TimeoutError:
        raise AssertionError(f"no end of the answers to {data!r}") from None
