"""Requests over HTTP/2 without TLS (prior knowledge), as gateways and service meshes speak it to their backends.

The connection is that of the picker's gRPC. Each stream is one request, which the dispatcher serves as it serves those
of HTTP/1.1. A response waits in its stream while the peer's window is closed, and its worker is not read meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import unquote

from uvicorn.server import ServerState

from http_api.errors import RequestError
from router.auth import too_large, too_slow
from router.forwarding.dispatcher import Dispatcher
from router.forwarding.exchange import ResponseWriter, RoutingHeaders, ServedRequest
from router.forwarding.request_context import RequestContext, RequestHead, ServerAddress
from router.http.headers import LENGTH, WITHOUT_BODY, Headers, ResponseHead, length_of, without_cors
from router.http.strict_requests import head_problem, without_root
from router.picker.http2 import frames
from router.picker.http2.connection import Http2Connection, PeerAllowances
from router.picker.http2.headers import RequestHeaders, are_regular
from router.picker.http2.stream import Stream, StreamHandler

_HEAD: Final = "HEAD"
_PATIENCE: Final = 60.0
_allowances: Final = PeerAllowances()


def connection_of(
    accept: Callable[[RequestHeaders, Stream], StreamHandler],
    server_state: ServerState,
    loop: asyncio.AbstractEventLoop,
) -> Http2Connection:
    """Return the protocol of a connection, which the server counts. A client that reads slowly answers pings late."""
    connections: Any = server_state.connections
    return Http2Connection(accept, connections, _allowances, loop, _PATIENCE)


def header_block(status: int, headers: Headers) -> bytes:
    """Encode a response's headers without a dynamic table (RFC 7541, 6.2.2). Values lose outer spaces.

    Raises ValueError for a header that HTTP/2 does not have (RFC 9113, 8.2).
    """
    headers = [(name, value.strip(b" \t")) for name, value in headers]
    if not are_regular(headers):
        raise ValueError("a header of the response does not exist in HTTP/2")
    lines = [(b":status", b"%d" % status), *headers]
    return b"".join([b"\0" + _text(name) + _text(value) for name, value in lines])


def _text(value: bytes) -> bytes:
    size = len(value)
    if size < 127:
        return bytes((size,)) + value
    size -= 127
    length = bytearray(b"\x7f")
    while size >= 128:
        length.append(size & 0x7F | 0x80)
        size >>= 7
    length.append(size)
    return bytes(length) + value


class Http2Response(ResponseWriter):
    """The response to one request. `over`: it is complete or was broken off."""

    def __init__(self, stream: Stream, context: RequestContext, server_state: ServerState, cors: Headers) -> None:
        self.over = False
        self._stream = stream
        self._context = context
        self._server_state = server_state
        self._cors = cors

    def begin(self, head: ResponseHead, ours: RoutingHeaders | None, data: bytes, ended: bool) -> None:
        context, status = self._context, head.status
        routing = [] if ours is None else ours.headers()
        context.answered(status, routing if context.logged else [])
        passed = without_cors(head.passed_on) if self._cors else head.passed_on
        lines = [each for each in self._server_state.default_headers if each[0] != b"connection"]
        lines += [each for each in passed if each[0] != LENGTH]
        lines += [*routing, *self._cors, (b"x-request-id", context.id)]
        bodiless = context.head.method == _HEAD or status in WITHOUT_BODY
        if head.length:
            lines.append((LENGTH, head.length))
        elif ended and not bodiless:
            lines.append((LENGTH, b"%d" % len(data)))
        self._stream.begin(header_block(status, lines))
        self.more(b"" if bodiless else data, ended)

    def more(self, data: bytes, ended: bool) -> None:
        if data and self._context.logged:
            self._context.passed(len(data))
        if data:
            self._stream.send(data)
        if ended:
            self.over = True
            self._stream.end(b"")

    def comment(self, data: bytes) -> None:
        self._stream.send(data)

    def break_off(self) -> None:
        self.over = True
        self._stream.reset(frames.INTERNAL_ERROR)


class Http2Request:
    """A request, from its headers to the end of its stream."""

    def __init__(
        self,
        headers: RequestHeaders,
        stream: Stream,
        dispatcher: Dispatcher,
        server_state: ServerState,
        address: ServerAddress | None,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._limits = dispatcher.settings
        self._dispatcher = dispatcher
        self._body: list[bytes] = []
        self._size = 0
        self._current: ServedRequest | None = None
        self._deadline: asyncio.TimerHandle | None = None
        head, problem = _request_head(headers, dispatcher.settings.root_path.encode())
        self._context = context = dispatcher.contexts.begin(head, address)
        cors = dispatcher.cors
        lines = b"" if cors is None else cors.lines(head.headers)
        given = [line.partition(b": ")[::2] for line in lines.split(b"\r\n") if line]
        self._response = response = Http2Response(
            stream, context, server_state, [(name, value) for name, value in given]
        )
        if cors is not None and (answer := cors.preflight(head.method, head.headers)) is not None:
            status, preflight, body = answer
            response.begin(ResponseHead(status, preflight), None, body, True)
            return
        try:
            if problem is not None:
                raise RequestError(f"The request is not accepted: {problem}.", code="head")
            context.admit()
            announced = next((length_of(value) for name, value in head.headers if name == LENGTH), 0)
            if announced > self._limits.max_body_bytes:
                raise too_large(self._limits)
        except RequestError as error:
            self._refuse(error)
            return
        stream.on_blocked = self._blocked
        self._deadline = loop.call_later(self._limits.body_timeout, self._late)

    def data(self, data: bytes) -> None:
        """Receive bytes of the body."""
        if self._response.over:
            return
        try:
            self._dispatcher.contexts.gate.arrivals.add(self._size, len(data))
            self._size += len(data)
            if self._size > self._limits.max_body_bytes:
                raise too_large(self._limits)
        except RequestError as error:
            self._refuse(error)
            return
        self._body.append(data)

    def ended(self) -> None:
        """Serve the request, because it is complete."""
        if self._response.over:
            return
        body = b"".join(self._body)
        self._end_arrival()
        self._current = current = self._dispatcher.serve(self._context, self._response)
        current.start(body)

    def closed(self) -> None:
        """Cancel the request unless it was answered."""
        self._end_arrival()
        if not self._response.over:
            self._response.over = True
            if self._current is None:
                self._context.abandoned()
            else:
                self._current.client_disconnected()
        self._context.end()

    def _blocked(self, blocked: bool) -> None:
        if self._current is not None:
            (self._current.pause if blocked else self._current.resume)()

    def _late(self) -> None:
        self._refuse(too_slow(self._limits))

    def _refuse(self, error: RequestError) -> None:
        if not self._response.over:
            headers, body = self._context.refusal(error)
            self._response.begin(ResponseHead(error.status, headers), None, body, True)

    def _end_arrival(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        self._dispatcher.contexts.gate.arrivals.end(self._size)
        self._size, self._body = 0, []


def _request_head(headers: RequestHeaders, root: bytes) -> tuple[RequestHead, str | None]:
    """Return the head of a request, as HTTP/1.1 would have it, and why it is refused; None if it is accepted."""
    fields = [each for each in headers.headers if not each[0].startswith(b":")]
    authority, hosts = headers.first(b":authority"), {value for name, value in fields if name == b"host"}
    problem = None
    if authority:
        if hosts - {authority}:
            problem = "Host is not :authority"
        fields = [(b"host", authority), *(each for each in fields if each[0] != b"host")]
    cookies = [value for name, value in fields if name == b"cookie"]
    if len(cookies) > 1:  # RFC 9113, 8.2.3
        fields = [*(each for each in fields if each[0] != b"cookie"), (b"cookie", b"; ".join(cookies))]
    target = without_root(headers.path, root) if root else headers.path
    path, _, query = target.partition(b"?")
    decoded = path.decode("latin-1")
    method = headers.first(b":method").decode("latin-1")
    head = RequestHead(method, unquote(decoded) if "%" in decoded else decoded, target if query else path, fields)
    return head, problem or head_problem(target, "1.1", fields)
