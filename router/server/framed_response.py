"""Frames one response, and writes it to the client's connection.

A worker's response is framed again, so that only its understood parts are forwarded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum
from http import HTTPStatus
from typing import Final

from mypy_extensions import trait
from uvicorn.server import ServerState

from router.forwarding.exchange import ChunkWriter, ResponseWriter, RoutingHeaders
from router.forwarding.request_context import RequestContext
from router.http.headers import WITHOUT_BODY, Headers, ResponseHead, lines_of, without_cors
from router.http.unparsed import LAST, body_size
from router.http.websocket import WebSocketPeer

_STATUS_LINES: Final = {each.value: b"HTTP/1.1 %d %b\r\n" % (each.value, each.phrase.encode()) for each in HTTPStatus}
_OK: Final = 200
_SWITCHING: Final = 101
_HEAD: Final = "HEAD"
# A longer body is not copied behind its head.
_ONE_BUFFER: Final = 64 * 1024


class Framing(Enum):
    """The end of a response's body, as the client recognizes it (RFC 9112, 6.3)."""

    LENGTH = "a content-length, or a status without a body"
    CHUNKED = "chunks"
    UNTIL_CLOSE = "the end of the connection"


# A look-up in the enumeration would cost more than the comparison.
_LENGTH: Final = Framing.LENGTH
_CHUNKED: Final = Framing.CHUNKED
_UNTIL_CLOSE: Final = Framing.UNTIL_CLOSE


@trait
class ResponseOwner:
    """A connection that responses are written to."""

    def response_ended(self) -> None:
        """Continue after a response: it is complete."""
        raise NotImplementedError

    def response_switched(self, peer: WebSocketPeer, on_stop: Callable[[], None], on_end: Callable[[], None]) -> None:
        """Give the connection to a peer."""
        raise NotImplementedError

    def response_broken_off(self, until_close: bool) -> None:
        """Close the connection of an incomplete response, by a reset if `until_close` would make it seem complete."""
        raise NotImplementedError


class FramedResponse(ResponseWriter):
    """The response to one request. `keep_alive`, the connection's, is final once the response has begun."""

    __slots__ = (
        "_chunks_allowed",
        "_cors",
        "_framing",
        "_owner",
        "_server_state",
        "_transport",
        "context",
        "keep_alive",
    )

    def __init__(
        self,
        owner: ResponseOwner,
        transport: asyncio.Transport,
        server_state: ServerState,
        context: RequestContext,
        keep_alive: bool,
        chunks_allowed: bool,
        cors: bytes,
    ) -> None:
        """Create the response. `chunks_allowed`: the client speaks HTTP/1.1. `cors`: header lines, if any."""
        self._owner = owner
        self._transport = transport
        self._server_state = server_state
        self.context = context
        self.keep_alive = keep_alive
        self._chunks_allowed = chunks_allowed
        self._cors = cors
        self._framing = _LENGTH

    def begin(self, head: ResponseHead, ours: RoutingHeaders | None, data: bytes, ended: bool) -> None:
        context, status, size = self.context, head.status, len(data)
        first_lines = _first_lines.of(self._server_state, status)
        if _first_lines.close:
            self.keep_alive = False
        context.answered(status, ours.headers() if ours is not None and context.logged else [])
        if data and context.logged:
            context.passed(size)
        if self._cors:
            head = ResponseHead(status, without_cors(head.headers))
        beginning = head.beginning(first_lines)
        routing = ours.lines() if ours is not None else b""
        bodiless = context.head.method == _HEAD
        if ended and not head.length and self.keep_alive and size <= _ONE_BUFFER and status == _OK and not bodiless:
            # Nearly all responses.
            length = str(size).encode()
            self._transport.write(
                b"%b%b%bx-request-id: %b\r\ncontent-length: %b\r\n\r\n%b"
                % (beginning, routing, self._cors, context.id, length, data)
            )
            self._owner.response_ended()
            return
        framing = self._choose_framing(head, size, ended and not (bodiless and not size))
        if bodiless:
            data = b""
        connection = b"" if self.keep_alive else b"connection: close\r\n"
        if data and self._framing is _CHUNKED:
            data = _chunk(data)
        lines = [beginning, routing, self._cors, b"x-request-id: ", context.id, b"\r\n", framing, connection, b"\r\n"]
        if size <= _ONE_BUFFER:
            lines.append(data)
            self._transport.write(b"".join(lines))
        else:
            self._transport.writelines((b"".join(lines), data))
        if ended:
            self._owner.response_ended()

    def _choose_framing(self, head: ResponseHead, size: int, ended: bool) -> bytes:
        """Choose the body's framing, and return its header line; empty if it has no header."""
        if head.length:
            return b"content-length: %b\r\n" % head.length
        if head.status in WITHOUT_BODY:
            return b""
        if ended:
            return b"content-length: %d\r\n" % size
        if self._chunks_allowed:
            self._framing = _CHUNKED
            return b"transfer-encoding: chunked\r\n"
        self._framing, self.keep_alive = _UNTIL_CLOSE, False
        return b""

    def more(self, data: bytes, ended: bool) -> None:
        if data and self.context.logged:
            self.context.passed(len(data))
        if self._framing is _CHUNKED:
            if data:
                data = _chunk(data)
            if ended:
                data += LAST
        if data:
            self._transport.write(data)
        if ended:
            self._owner.response_ended()

    def comment(self, data: bytes) -> None:
        self._transport.write(_chunk(data) if self._framing is _CHUNKED else data)

    def chunks(self) -> ChunkWriter | None:
        if self._framing is not _CHUNKED:
            return None
        return _LoggedChunks(self._transport, self.context) if self.context.logged else self._transport

    def switch(
        self,
        lines: Headers,
        ours: RoutingHeaders,
        peer: WebSocketPeer,
        on_stop: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        context = self.context
        context.answered(_SWITCHING, ours.headers() if context.logged else [])
        beginning = _first_lines.of(self._server_state, _SWITCHING)
        self._transport.write(
            b"%b%b%b%bx-request-id: %b\r\n\r\n" % (beginning, lines_of(lines), ours.lines(), self._cors, context.id)
        )
        self._owner.response_switched(peer, on_stop, on_end)

    def break_off(self) -> None:
        self._owner.response_broken_off(self._framing is _UNTIL_CLOSE)


class _LoggedChunks:
    """Writes chunks, and counts their bytes for the access log."""

    __slots__ = ("_context", "_transport")

    def __init__(self, transport: asyncio.Transport, context: RequestContext) -> None:
        self._transport = transport
        self._context = context

    def write(self, data: bytes) -> None:
        self._context.passed(body_size(data))
        self._transport.write(data)


class _FirstLines:
    """The beginning of every response: the status line, the date and other default headers."""

    __slots__ = ("_by_status", "_headers", "_lines", "close")

    def __init__(self) -> None:
        self._headers: Headers | None = None
        self._lines = b""
        self._by_status: dict[int, bytes] = {}
        self.close = False

    def of(self, state: ServerState, status: int) -> bytes:
        """Return the first lines of a response; the same object until the default headers change."""
        if state.default_headers is not self._headers:
            self._headers = headers = state.default_headers
            self._lines = lines_of([header for header in headers if header[0] != b"connection"])
            self._by_status = {}
            self.close = (b"connection", b"close") in headers
        known = self._by_status.get(status)
        if known is None:
            line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
            known = self._by_status[status] = line + self._lines
        return known


_first_lines: Final = _FirstLines()


def bad_request(state: ServerState, problem: str) -> bytes:
    """Return the response to bytes that cannot be parsed. The connection is closed after it."""
    return (
        b"HTTP/1.1 400 Bad Request\r\n%bcontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
        b"connection: close\r\n\r\n%b" % (lines_of(state.default_headers), len(problem), problem.encode("ascii"))
    )


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
