"""The connections to the workers, and one request's way over them.

Idle connections are kept for less than the engines keep theirs, the latest used first. When a kept one turns out to be
closed, the request goes over a new one: no byte of an answer came, so the worker had closed before it read it.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from contextvars import Context
from typing import Final

from router.http.cached_head import CachedHead
from router.http.deadline import Deadline
from router.http.origin import Origin, end_of_head
from router.http.response_head import ResponseHead
from router.upstream.connection import (
    CachedStreamHead,
    ChunkForwarder,
    ResponseHandler,
    UnreachableError,
    UpstreamConnection,
    UpstreamError,
)

_now: Final = time.monotonic
# vLLM and SGLang close a connection that is idle for 5 seconds: a request sent at that moment would be lost.
KEEPALIVE_SECONDS = 4.0
# Idle connections that are kept for a worker.
MAX_IDLE = 1024
# A body that is larger is written beside its head, not copied behind it.
_ONE_BUFFER: Final = 64 * 1024
# How many different beginnings of requests to a worker are kept.
_MOST_OPENINGS: Final = 256


class UpstreamRequest:
    """One request on its way to one worker.

    `request` is written at once: all of it, or the head where `body` is written after it.

    `forwarder` gets whole chunks of whole lines of the answer's body as they come; None while all is the receiver's.
    """

    __slots__ = (
        "_connecting",
        "_connection",
        "_paused",
        "_sent_before",
        "_upstream",
        "body",
        "forwarder",
        "handler",
        "method",
        "request",
    )

    def __init__(
        self, upstream: Upstream, handler: ResponseHandler, method: str, request: bytes, body: bytes = b""
    ) -> None:
        self.method = method
        self.request = request
        self.body = body
        self._upstream = upstream
        self.handler: ResponseHandler | None = handler
        self.forwarder: ChunkForwarder | None = None
        self._connection: UpstreamConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._paused = False
        self._sent_before = False  # over a connection that broke

    def pause(self) -> None:
        """Read no more of the answer for now."""
        self._paused = True
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Read on."""
        self._paused = False
        if self._connection is not None:
            self._connection.resume()

    def abort(self) -> None:
        """Call the request off. The receiver hears nothing more."""
        self.handler = None
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        if self._connecting is not None:
            self._connecting.cancel()

    # What connections tell.

    def go(self, now: float) -> None:
        """Take the latest connection that is idle, or make one."""
        connection = self._upstream.idle(now)
        if connection is None:
            self._connecting = self._upstream.connect(self)
        else:
            self.over(connection)

    def go_alone(self) -> None:
        """Make a connection."""
        self._connecting = self._upstream.connect(self)

    def over(self, connection: UpstreamConnection) -> None:
        """Go over this connection."""
        self._connecting = None
        self._connection = connection
        connection.send(self)
        if self._paused:
            connection.pause()

    def answered(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        handler = self.handler
        if ended:
            self._connection = self.handler = None
        if handler is not None:
            handler.answered(head, data, ended)

    def more(self, data: bytes, ended: bool) -> None:
        handler = self.handler
        if ended:
            self._connection = self.handler = None
        if handler is not None:
            handler.more(data, ended)

    def broke(self, error: UpstreamError, unheard: bool) -> None:
        """The connection failed; `unheard`: it had been used before, and nothing came of this request's answer."""
        self._connection = None
        if self.handler is None:
            return
        if unheard and not self._upstream.closing:
            self._sent_before = True
            self._connecting = self._upstream.connect(self)
        else:
            self.failed(error)

    def failed(self, error: UpstreamError) -> None:
        handler, self.handler = self.handler, None
        self._connecting = None
        if self._sent_before and isinstance(error, UnreachableError):
            error = UpstreamError(f"closed before it answered; then {error}")
        if handler is not None:
            handler.failed(error)


class _Opening:
    """The head of a request up to its id, and what it was made of beside its lines."""

    __slots__ = ("head", "method", "target")

    def __init__(self, method: str, target: bytes, head: bytes) -> None:
        self.method = method
        self.target = target
        self.head = head


class Upstream:
    """The connections to one worker."""

    def __init__(self, url: str, tls: ssl.SSLContext, connect_timeout: float, idle_timeout: float) -> None:
        self.origin = Origin.of(url)
        self.idle_timeout = idle_timeout
        self.closing = False
        self.known_head: CachedHead[ResponseHead] | None = None  # of its last answer that came at once
        self.known_stream: CachedStreamHead | None = None
        self._tls = tls if self.origin.tls else None
        self._connect_timeout = connect_timeout
        self._loop = asyncio.get_running_loop()
        self._connections: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []  # the latest used last
        self._connecting: set[asyncio.Task[None]] = set()
        self._sweep = Deadline(self._loop, self._drop_old)
        self._openings: dict[bytes, _Opening] = {}

    def send(
        self,
        handler: ResponseHandler,
        method: str,
        target: bytes,
        lines: bytes,
        body: bytes,
        request_id: bytes = b"",
        now: float | None = None,
        once: bool = False,
    ) -> UpstreamRequest:
        """Send a request. `target` is a path with its query; `lines` are the headers that are about the message.

        `request_id`: what comes beside them, where the same lines come with many requests. `now`: by `time.monotonic`,
        where it was just read. `once`: over a connection of its own; a kept one may turn out to be closed too late.
        """
        end = end_of_head(method, len(body))
        beside = len(body) > _ONE_BUFFER
        behind = b"" if beside else body
        if request_id:
            request = b"%b%b\r\n%b%b" % (self._opening(method, target, lines), request_id, end, behind)
        else:
            request = b"%b%b%b" % (self.origin.opening(method, target, lines), end, behind)
        sent = UpstreamRequest(self, handler, method, request, body if beside else b"")
        if once:
            sent.go_alone()
        else:
            sent.go(_now() if now is None else now)
        return sent

    def _opening(self, method: str, target: bytes, lines: bytes) -> bytes:
        """What a request's head begins with, up to its id."""
        known = self._openings.get(lines)
        if known is not None and known.method == method and known.target == target:
            return known.head
        if len(self._openings) >= _MOST_OPENINGS:
            self._openings.clear()
        head = self.origin.opening(method, target, lines) + b"x-request-id: "
        self._openings[lines] = _Opening(method, target, head)
        return head

    @property
    def open_connections(self) -> int:
        """How many connections there are, idle or not."""
        return len(self._connections)

    @property
    def idle_connections(self) -> int:
        """How many of them are idle."""
        return len(self._idle)

    def retire(self) -> None:
        """The worker is gone: requests that it has may finish."""
        self.closing = True
        self._sweep.close()
        for connection in list(self._idle):
            connection.abort()

    async def close(self) -> None:
        """Close every connection; what is on its way fails."""
        self.retire()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in list(self._connections):
            sent = connection.current
            connection.abort()
            if sent is not None:
                sent.failed(UpstreamError("the router stops"))

    # What legs and connections ask.

    def idle(self, now: float) -> UpstreamConnection | None:
        """A kept connection, not idle any more."""
        if self._idle:
            connection = self._idle.pop()
            connection.idle = False
            if now - connection.idle_since < KEEPALIVE_SECONDS:
                return connection
            connection.abort()  # and all others are older
            self._drop_old()
        return None

    def connect(self, sent: UpstreamRequest) -> asyncio.Task[None]:
        """Make a connection for a leg."""
        # In a context of its own: the connection will serve other requests too.
        task = self._loop.create_task(self._connect(sent), context=Context())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    def opened(self, connection: UpstreamConnection) -> None:
        self._connections.add(connection)

    def closed(self, connection: UpstreamConnection) -> None:
        self._connections.discard(connection)
        if connection.idle:
            connection.idle = False
            self._idle.remove(connection)

    def keep(self, connection: UpstreamConnection) -> None:
        """A connection is idle."""
        if self.closing or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        connection.idle = True
        connection.idle_since = _now()
        if not self._idle:
            self._sweep.set(KEEPALIVE_SECONDS)
        self._idle.append(connection)

    def _drop_old(self) -> None:
        limit = _now() - KEEPALIVE_SECONDS
        old = 0
        while old < len(self._idle) and self._idle[old].idle_since <= limit:
            old += 1
        dropped, self._idle = self._idle[:old], self._idle[old:]
        for connection in dropped:
            connection.idle = False
            connection.abort()
        if self._idle:
            self._sweep.set(self._idle[0].idle_since - limit)

    async def _connect(self, sent: UpstreamRequest) -> None:
        origin = self.origin
        try:
            async with asyncio.timeout(self._connect_timeout):
                _, connection = await self._loop.create_connection(
                    lambda: UpstreamConnection(self),  # type: ignore[type-var]  # it has what asyncio asks of protocols
                    origin.host,
                    origin.port,
                    ssl=self._tls,
                    server_hostname=origin.host if self._tls else None,
                )
        except TimeoutError:
            sent.failed(UnreachableError(f"no connection within {self._connect_timeout:g} s"))
        except (OSError, ValueError) as error:
            sent.failed(UnreachableError(str(error) or type(error).__name__))
        else:
            sent.over(connection)


class Upstreams:
    """The connections to all workers. `close` ends them."""

    def __init__(self, tls: ssl.SSLContext, connect_timeout: float, idle_timeout: float) -> None:
        self._tls = tls
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._upstreams: dict[str, Upstream] = {}
        self._retired: list[Upstream] = []

    def of(self, url: str) -> Upstream:
        """Those to the worker with this URL."""
        upstream = self._upstreams.get(url)
        if upstream is None:
            upstream = Upstream(url, self._tls, self._connect_timeout, self._idle_timeout)
            self._upstreams[url] = upstream
        return upstream

    def forget(self, url: str) -> None:
        """A worker was removed: idle connections to it are closed, and others when their requests end."""
        upstream = self._upstreams.pop(url, None)
        if upstream is not None:
            upstream.retire()
            self._retired = [each for each in (*self._retired, upstream) if each.open_connections]

    @property
    def open_connections(self) -> int:
        """How many connections there are to all of them, idle or not."""
        return sum(upstream.open_connections for upstream in (*self._upstreams.values(), *self._retired))

    async def close(self) -> None:
        """Close every connection; what is on its way fails."""
        for upstream in (*self._upstreams.values(), *self._retired):
            await upstream.close()
