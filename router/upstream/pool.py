"""The connections to the workers, and the choice of a connection for a request.

Idle connections are kept for less time than engines keep theirs, and the most recently used is taken first. If a kept
connection turns out to be closed, the request is sent over a new one. No byte of a response was received then, so the
worker had closed the connection before it read the request.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from functools import partial
from typing import Final

from router.http.client import connection_problem
from router.http.event_loop import Deadline
from router.http.worker_url import Origin
from router.upstream.connection import ConnectionOwner, ConnectionState, UpstreamConnection
from router.upstream.request import ResponseHandler, UnreachableError, UpstreamError, UpstreamRequest

_now: Final = time.monotonic
# Constants, because the lookup of an enumeration's member is slow.
_IDLE: Final = ConnectionState.IDLE
_REUSED: Final = ConnectionState.REUSED
# Returns the address to connect to for a host. Raises OSError for a forbidden address.
AddressOf = Callable[[str], Awaitable[str]]
# vLLM and SGLang close a connection that is idle for 5 seconds: a request sent at that moment would be lost.
KEEPALIVE_SECONDS = 4.0
# Maximum number of idle connections to a worker.
MAX_IDLE = 1024
# Seconds after the connect timeout. If this process paused, the loop reads in them that the connection is open.
_AFTER_PAUSE: Final = 0.1
_METHODS_WITH_BODY: Final = frozenset(("POST", "PUT", "PATCH"))
# A larger body is written separately, to avoid a copy.
_ONE_BUFFER: Final = 64 * 1024
# Maximum number of cached beginnings of requests to a worker.
_MOST_OPENINGS: Final = 256


class _Opening:
    """The head of a request up to its id, with the method and target that it was made from."""

    __slots__ = ("head", "method", "target")

    def __init__(self, method: str, target: bytes, head: bytes) -> None:
        self.method = method
        self.target = target
        self.head = head


class Upstream(ConnectionOwner):
    """The connections to one worker."""

    def __init__(
        self,
        url: str,
        tls: ssl.SSLContext,
        connect_timeout: float,
        idle_timeout: float,
        address_of: AddressOf | None = None,
        authorization: bytes | None = None,
        on_broken: Callable[[], None] = lambda: None,
    ) -> None:
        """Create a pool for the worker at `url`.

        - `address_of`: returns the address for a host; None connects to the host itself.
        - `on_broken`: called when the worker closes an idle connection.
        """
        super().__init__(idle_timeout)
        self.origin = Origin.of(url)
        self.closing = False
        self._tls = tls if self.origin.tls else None
        self._address_of = address_of
        self._connect_timeout = connect_timeout
        self._loop = asyncio.get_running_loop()
        self._connections: set[UpstreamConnection] = set()
        self._idle: list[UpstreamConnection] = []  # the latest used last
        self._connecting: set[asyncio.Task[None]] = set()
        self._sweep = Deadline(self._loop, self._drop_old)
        self._openings: dict[bytes, _Opening] = {}
        self._bare_openings: dict[bytes, _Opening] = {}
        self._on_broken = on_broken
        self._authorization = b""
        self.show(authorization)

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
        add_worker_key: bool = True,
    ) -> UpstreamRequest:
        """Send a request and return it.

        - `request_id`: an id that is sent beside the lines; b"" if the lines have it.
        - `once`: open a new connection, because a kept one may be closed and the request may not be sent twice.
        - `add_worker_key`: add the worker's API key if the lines have no `authorization`.
        """
        end = end_of_head(method, len(body))
        beside = len(body) > _ONE_BUFFER
        behind = b"" if beside else body
        if request_id:
            request = b"%b%b\r\n%b%b" % (self._opening(method, target, lines, add_worker_key), request_id, end, behind)
        else:
            request = b"%b%b%b" % (self.beginning(method, target, lines, add_worker_key), end, behind)
        connection = None if once else self._take_idle(_now() if now is None else now)
        sent = UpstreamRequest(handler, method, request, body if beside else b"")
        if connection is None:
            self._connect_for(sent)
        else:
            connection.send(sent)
        return sent

    def show(self, authorization: bytes | None) -> None:
        """Use these credentials for the worker from now on."""
        self._authorization = b"authorization: %b\r\n" % authorization if authorization is not None else b""
        self._openings.clear()

    def beginning(self, method: str, target: bytes, lines: bytes, add_worker_key: bool) -> bytes:
        """Return the beginning of a request's head, with the worker's API key if the lines have none."""
        if add_worker_key and self._authorization and b"\r\nauthorization:" not in b"\r\n" + lines:
            lines += self._authorization
        return self.origin.opening(method, target, lines)

    def _opening(self, method: str, target: bytes, lines: bytes, add_worker_key: bool) -> bytes:
        """Return the cached beginning of a request's head, up to the request id."""
        openings = self._openings if add_worker_key else self._bare_openings
        known = openings.get(lines)
        if known is not None and known.method == method and known.target == target:
            return known.head
        if len(openings) >= _MOST_OPENINGS:
            openings.clear()
        head = self.beginning(method, target, lines, add_worker_key) + b"x-request-id: "
        openings[lines] = _Opening(method, target, head)
        return head

    @property
    def open_connections(self) -> int:
        """The number of connections, idle or not."""
        return len(self._connections)

    @property
    def idle_connections(self) -> int:
        return len(self._idle)

    def retire(self) -> None:
        """Close idle connections of a removed worker; its requests may finish."""
        self.closing = True
        self._sweep.close()
        for connection in list(self._idle):
            connection.abort()

    async def close(self) -> None:
        """Close every connection; requests in flight fail."""
        self.retire()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)
        for connection in list(self._connections):
            sent = connection.current
            connection.abort()
            if sent is not None:
                sent.fail(UpstreamError("the router stops"))

    # Called by connections

    def opened(self, connection: UpstreamConnection) -> None:
        self._connections.add(connection)

    def closed(self, connection: UpstreamConnection) -> None:
        self._connections.discard(connection)
        if connection.state is _IDLE:
            connection.state = _REUSED
            self._idle.remove(connection)
            if not self.closing:
                self._on_broken()

    def keep(self, connection: UpstreamConnection) -> None:
        if self.closing or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        connection.state = _IDLE
        connection.idle_since = _now()
        if not self._idle:
            self._sweep.set(KEEPALIVE_SECONDS)
        self._idle.append(connection)

    def failed(self, request: UpstreamRequest, error: UpstreamError, unanswered: bool) -> None:
        request.connection = None
        if request.handler is None:
            return
        if unanswered and not self.closing:
            request.sent_before = True
            self._connect_for(request)
        else:
            request.fail(error)

    # The choice of a connection

    def _take_idle(self, now: float) -> UpstreamConnection | None:
        """Return the most recently used idle connection; None without one."""
        if self._idle:
            connection = self._idle.pop()
            connection.state = _REUSED
            if now - connection.idle_since < KEEPALIVE_SECONDS:
                return connection
            connection.abort()  # all other idle connections are older
            self._drop_old()
        return None

    def _connect_for(self, request: UpstreamRequest) -> None:
        # An empty context, because the connection will serve other requests, too.
        task = self._loop.create_task(self._connect(request), context=Context())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        request.connecting = task

    def _drop_old(self) -> None:
        limit = _now() - KEEPALIVE_SECONDS
        old = 0
        while old < len(self._idle) and self._idle[old].idle_since <= limit:
            old += 1
        dropped, self._idle = self._idle[:old], self._idle[old:]
        for connection in dropped:
            connection.state = _REUSED
            connection.abort()
        if self._idle:
            self._sweep.set(self._idle[0].idle_since - limit)

    async def _connect(self, request: UpstreamRequest) -> None:
        try:
            connection = await self._connected()
        except UnreachableError as error:
            request.fail(error)
        else:
            connection.send(request)

    async def open(self, make: Callable[[], asyncio.BaseProtocol]) -> None:
        """Open a connection with a protocol of its own, that the pool does not keep. Raises UnreachableError."""
        origin, loop = self.origin, self._loop
        limit = asyncio.timeout(None)
        late = loop.call_later(self._connect_timeout, lambda: limit.reschedule(loop.time() + _AFTER_PAUSE))
        try:
            async with limit:
                host = origin.host if self._address_of is None else await self._address_of(origin.host)
                name = origin.host if self._tls else None
                await loop.create_connection(make, host, origin.port, ssl=self._tls, server_hostname=name)
        except TimeoutError as error:
            raise UnreachableError(f"no connection within {self._connect_timeout:g} s") from error
        except (OSError, ValueError) as error:
            raise UnreachableError(connection_problem(error)) from error
        finally:
            late.cancel()

    async def _connected(self) -> UpstreamConnection:
        made: list[UpstreamConnection] = []

        def make() -> UpstreamConnection:
            made.append(UpstreamConnection(self))
            return made[-1]

        try:
            await self.open(make)  # type: ignore[arg-type]  # it has the methods of asyncio's protocols
        except BaseException:
            # If it is cancelled at the moment of opening, uvloop closes the connection without a callback.
            for connection in made:
                self.closed(connection)
            raise
        return made[-1]


def end_of_head(method: str, body_bytes: int) -> bytes:
    """Return the end of a request's head, for a body of `body_bytes` bytes."""
    if body_bytes or method in _METHODS_WITH_BODY:
        return b"content-length: %b\r\n\r\n" % str(body_bytes).encode()
    return b"\r\n"


class Upstreams:
    """The connections to all workers. `on_broken` gets the URL of a worker that closes an idle one."""

    def __init__(
        self,
        tls: ssl.SSLContext,
        connect_timeout: float,
        idle_timeout: float,
        address_of: AddressOf | None = None,
        key_of: Callable[[str], bytes | None] = lambda _: None,
    ) -> None:
        """Create the pools. `key_of` returns the credentials for a worker's URL."""
        self.on_broken: list[Callable[[str], None]] = []
        self._tls = tls
        self._address_of = address_of
        self._connect_timeout = connect_timeout
        self._idle_timeout = idle_timeout
        self._key_of = key_of
        self._upstreams: dict[str, Upstream] = {}
        self._retired: list[Upstream] = []

    def get(self, url: str) -> Upstream:
        """Return the connections to the worker with this URL."""
        upstream = self._upstreams.get(url)
        if upstream is None:
            timeouts = self._connect_timeout, self._idle_timeout
            key = self._key_of(url)
            upstream = Upstream(url, self._tls, *timeouts, self._address_of, key, partial(self._broken, url))
            self._upstreams[url] = upstream
        return upstream

    def _broken(self, url: str) -> None:
        for on_broken in self.on_broken:
            on_broken(url)

    def show(self, url: str, authorization: bytes | None) -> None:
        """Use these credentials for the worker with this URL from now on."""
        if url in self._upstreams:
            self._upstreams[url].show(authorization)

    def forget(self, url: str) -> None:
        """Drop a removed worker: idle connections are closed now, the others when their requests end."""
        upstream = self._upstreams.pop(url, None)
        if upstream is not None:
            upstream.retire()
            self._retired = [each for each in (*self._retired, upstream) if each.open_connections]

    @property
    def open_connections(self) -> int:
        """The number of connections to all workers, idle or not."""
        return sum(upstream.open_connections for upstream in (*self._upstreams.values(), *self._retired))

    async def close(self) -> None:
        """Close every connection; requests in flight fail."""
        for upstream in (*self._upstreams.values(), *self._retired):
            await upstream.close()
