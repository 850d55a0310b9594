"""The ways in to a router: over sockets, or straight into its protocol, which reads and answers the same bytes.

A connection in the process costs a tenth of one over a socket. There the bytes come in several pieces too.
"""

from __future__ import annotations

import asyncio
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import partial
from random import Random
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from recording_worker import RecordingWorker
from starlette.datastructures import State
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from router.forwarding.dispatcher import Dispatcher
from router.forwarding.proxy_services import ProxyContext
from router.server.http_server import HttpServer

_ANSWER_SECONDS = 30.0
# Rounds of the loop without a response after which a connection counts as quiet. Rounds, unlike a clock, stop with it.
_QUIET_ROUNDS = 20
_ROUND_SECONDS = {True: 0.01, False: 0.05}  # in the process, or over sockets
_PIECES = 8
# How many of a connection's requests are answered by some bytes.
Answered = Callable[[bytes], int]


class Manner(Enum):
    """The manner in which a connection's requests are sent."""

    AT_ONCE = auto()
    IN_PIECES = auto()  # of any size
    ONE_BY_ONE = auto()  # each when the one before it is answered
    HALF_CLOSED = auto()  # at once, and at once it is said that nothing more follows


class _Client:
    """A client that sends a connection's requests, and keeps the responses until the other side closes.

    Once the connection is quiet, it half-closes, because the side that closes first leaves a port in TIME_WAIT.
    """

    def __init__(
        self, requests: Sequence[bytes], random: Random, manner: Manner, answered: Answered, in_process: bool
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._requests = len(requests)
        self._one_by_one = manner is Manner.ONE_BY_ONE
        self._half_closes = manner is Manner.HALF_CLOSED
        self._answered = answered
        self._round_seconds = _ROUND_SECONDS[in_process]
        pieces = list(requests) if self._one_by_one else [b"".join(requests)]
        if manner is Manner.IN_PIECES:
            data = pieces[0]
            places = sorted(random.randrange(len(data) + 1) for _ in range(random.randrange(1, _PIECES)))
            pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
        self._pieces = [piece for piece in reversed(pieces) if piece]
        self._came: list[bytes] = []
        self._since = b""  # the bytes received since the last piece
        self._quiet = 0
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self.closed: asyncio.Future[bytes] = self._loop.create_future()

    @abstractmethod
    def send(self, data: bytes) -> bool:
        """Send this; whether more may follow at once."""

    @abstractmethod
    def end(self) -> None:
        """Say that nothing more follows."""

    def go_on(self) -> None:
        """Send what can be sent."""
        while self._pieces and not self._over:
            self._since = b""
            if not self.send(self._pieces.pop()) or self._one_by_one:
                break
        if self._half_closes and not self._pieces and not self._over:
            self._say_the_end()
        elif self._timer is None:
            self._timer = self._loop.call_later(self._round_seconds, self._listen)

    def came(self, data: bytes) -> None:
        """A part of an answer."""
        self._quiet = 0
        self._came.append(data)
        if self._one_by_one and self._pieces:
            self._since += data
            if self._answered(self._since):
                self._loop.call_soon(self.go_on)

    def lost(self) -> None:
        """The connection is closed."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if not self.closed.done():
            self.closed.set_result(b"".join(self._came))

    def _listen(self) -> None:
        if self._over:
            return
        self._quiet += 1
        if self._quiet < _QUIET_ROUNDS or self._pieces or self._answered(b"".join(self._came)) < self._requests - 1:
            self._timer = self._loop.call_later(self._round_seconds, self._listen)
        else:
            self._say_the_end()

    def _say_the_end(self) -> None:
        self._over = True
        self.end()


class OverSockets:
    """Connections to a router at a URL."""

    def __init__(self, url: str, worker: RecordingWorker) -> None:
        self.worker = worker
        self._url = urlsplit(url)

    async def answers(self, requests: Sequence[bytes], random: Random, manner: Manner, answered: Answered) -> bytes:
        """Send requests over a connection, and return all bytes received until the router closes it."""
        transport, client = await asyncio.get_running_loop().create_connection(
            lambda: _SocketClient(requests, random, manner, answered, in_process=False),
            self._url.hostname,
            self._url.port,
        )
        try:
            return await _in_time(client.closed, requests)
        finally:
            transport.abort()

    async def requests_in_flight(self) -> int:
        """Return the number of requests in flight from the router's report."""
        ask = b"GET /workers HTTP/1.1\r\nHost: r\r\nConnection: close\r\n\r\n"
        answer = await self.answers([ask], Random(0), Manner.AT_ONCE, len)
        (worker,) = json.loads(answer.partition(b"\r\n\r\n")[2])["workers"]
        return sum(rank["load"]["requests"] for rank in worker["ranks"])


class _SocketClient(_Client, asyncio.Protocol):
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self.go_on()

    def send(self, data: bytes) -> bool:
        self._transport.write(data)
        return True

    def end(self) -> None:
        if not self._transport.is_closing():
            self._transport.write_eof()

    def data_received(self, data: bytes) -> None:
        self.came(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.lost()


class _WithoutRoutes:
    """A router's dispatcher over an application without routes, which answers with nothing."""

    def __init__(self, app: FastAPI) -> None:
        self.state = State()
        proxy: ProxyContext = app.state.proxy_context
        questions = app.state.dispatcher.questions
        self.state.dispatcher = Dispatcher(self, proxy.contexts, proxy.settings, questions, proxy.services)

    async def __call__(self, _scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


class InProcess:
    """Connections without sockets, to the protocol of a server whose application has no routes."""

    def __init__(self, app: FastAPI, worker: RecordingWorker) -> None:
        self.worker = worker
        config: Any = HttpServer(_WithoutRoutes(app), shutdown_timeout=1).config  # type: ignore[arg-type]
        config.load()
        self._protocol = partial(config.http_protocol_class, config=config, server_state=ServerState(), app_state={})

    async def answers(self, requests: Sequence[bytes], random: Random, manner: Manner, answered: Answered) -> bytes:
        """Send requests to the protocol, and return all bytes written until it closes the connection."""
        client = _Memory(requests, random, manner, answered, in_process=True)
        client.connect(self._protocol())
        try:
            return await _in_time(client.closed, requests)
        finally:
            client.abort()


class _StillThere:
    """The socket of a client that keeps reading."""

    def getsockopt(self, *_: int) -> bytes:
        return b"\1"  # established

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 80

    getpeername = getsockname


class _Memory(_Client, asyncio.Transport):
    """A client that is the server's transport too. Its protocol is called as a loop calls it."""

    def connect(self, protocol: Any) -> None:
        self._extra: dict[str, Any] = {"socket": _StillThere()}
        self._protocol = protocol
        self._paused = self._closing = False
        protocol.connection_made(self)
        self.go_on()

    def send(self, data: bytes) -> bool:
        if self._paused:
            self._pieces.append(data)
            return False
        self._protocol.data_received(data)
        if self._pieces and not self._one_by_one:
            self._loop.call_soon(self.go_on)
        return False

    def end(self) -> None:
        if not self._closing and not self._protocol.eof_received():
            self.close()

    def write(self, data: Any) -> None:
        if not self._closing:
            self.came(bytes(data))

    def close(self) -> None:
        if not self._closing:
            self._closing = self._over = True
            self._loop.call_soon(self._lost)

    abort = close

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Ignore the half-close."""

    def _lost(self) -> None:
        self._protocol.connection_lost(None)
        self.lost()

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            self._loop.call_soon(self.go_on)

    def get_write_buffer_size(self) -> int:
        return 0


async def _in_time(closed: asyncio.Future[bytes], requests: Sequence[bytes]) -> bytes:
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await closed
    except TimeoutError:
        raise AssertionError(f"no end of the answers to {list(requests)!r}") from None
