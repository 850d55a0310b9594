"""One connection to a worker: it sends one request at a time and forwards the response.

llhttp parses responses (`response_parser`), with two exceptions. Complete chunks between two chunks do not change its
state, so they are forwarded unparsed. A complete response that begins with a cached head is not parsed either.
"""

from __future__ import annotations

import asyncio
import socket
from enum import Enum, auto
from typing import Final

from router.http.event_loop import Deadline
from router.http.headers import WITHOUT_BODY, ResponseHead
from router.http.unparsed import END, CachedHead, body_size
from router.upstream.request import (
    ChunkForwarder,
    RequestConnection,
    ResponseHandler,
    UpstreamError,
    UpstreamRequest,
    UpstreamTimeoutError,
)
from router.upstream.response_parser import Framing, ResponseParser, ResponsePhase

_QUICKACK: Final[int] = getattr(socket, "TCP_QUICKACK", -1)  # available only on Linux


class ConnectionState(Enum):
    """FRESH: it has its first request. IDLE: it waits for the next one. REUSED: it has a later request."""

    FRESH = auto()
    IDLE = auto()
    REUSED = auto()


# Constants, because the lookup of an enumeration's member is slow.
_WAITING: Final = ResponsePhase.WAITING
_HEAD: Final = ResponsePhase.HEAD
_BODY: Final = ResponsePhase.BODY


class ConnectionOwner:
    """The pool of a connection, and the cached head of the worker's last response that arrived at once, if any."""

    def __init__(self, idle_timeout: float) -> None:
        self.idle_timeout = idle_timeout
        self.cached_head: CachedHead[ResponseHead] | None = None

    def opened(self, connection: UpstreamConnection) -> None:
        """Called when a connection is opened."""
        raise NotImplementedError

    def closed(self, connection: UpstreamConnection) -> None:
        """Called when a connection is closed."""
        raise NotImplementedError

    def keep(self, connection: UpstreamConnection) -> None:
        """Called when a connection is idle and can serve another request."""
        raise NotImplementedError

    def failed(self, request: UpstreamRequest, error: UpstreamError, unanswered: bool) -> None:
        """Called when the connection fails. `unanswered`: it was kept, and no byte of this response was received."""
        raise NotImplementedError


class UpstreamConnection(RequestConnection):
    """A connection to a worker, as a protocol of asyncio. `current` is its request; None while it is idle."""

    __slots__ = (
        "_deadline",
        "_forwarder",
        "_owner",
        "_parser",
        "_paused",
        "_phase",
        "_quiet",
        "_transport",
        "current",
        "idle_since",
        "state",
    )

    def __init__(self, owner: ConnectionOwner) -> None:
        super().__init__()
        self.current: UpstreamRequest | None = None
        self.state = ConnectionState.FRESH
        self.idle_since = 0.0
        self._owner = owner
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._deadline = Deadline(asyncio.get_running_loop(), self._late, self._lives)
        self._paused = False
        self._quiet = True  # no chunk since the last check of the deadline
        # The response: how much of its head and body the handler has received.
        self._phase = _WAITING
        self._parser: ResponseParser | None = None  # created when it is first needed
        self._forwarder: ChunkForwarder | None = None

    def send(self, request: UpstreamRequest) -> None:
        """Write a request; its handler receives the response."""
        self.current = request
        request.connecting = None
        request.connection = self
        self._phase = _WAITING
        self._quiet = True
        if request.body:
            self._transport.writelines((request.request, request.body))  # one system call
        else:
            self._transport.write(request.request)
        self._deadline.set(self._owner.idle_timeout)
        if request.paused:
            self.pause()

    def pause(self) -> None:
        if not self._paused:
            self._paused = True
            self._deadline.clear()
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            if self.current is not None:
                self._deadline.set(self._owner.idle_timeout)
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def abort(self) -> None:
        self.current = self._forwarder = None
        self._deadline.close()
        self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        forwarder = self._forwarder
        if forwarder is not None:
            if body_size(data) and forwarder.forward(data):
                self._quiet = False
                return
            self._forwarder = None
        request = self.current
        if request is None:
            self._transport.abort()  # bytes without a request
            return
        first = self._phase is _WAITING
        if first:
            self._phase = _HEAD
            if request.method != "HEAD" and self._forward_cached_head(request, data):
                return
        self._parse(request, data, first)

    def eof_received(self) -> None:
        """Let asyncio close the connection."""

    def pause_writing(self) -> None:
        """Ignore it, because the transport buffers the whole request."""

    def resume_writing(self) -> None:
        """Ignore it, because writing is never paused."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        self.closed = True
        self._owner.closed(self)
        parser, self._parser = self._parser, None
        if parser is not None:
            parser.close()
        if self.current is None:
            return
        if self._phase is _BODY and parser is not None and parser.framing is Framing.UNTIL_CLOSE and exc is None:
            handler = self._complete(self.current, keep=False)
            if handler is not None:
                handler.on_body(b"", True)  # the end of the connection ends the response
            return
        error = UpstreamError(str(exc) or type(exc).__name__ if exc else "the worker closed the connection")
        self._fail(error, unanswered=self.state is ConnectionState.REUSED and self._phase is _WAITING)

    # Responses whose head is cached

    def _forward_cached_head(self, request: UpstreamRequest, data: bytes) -> bool:
        """Forward a response whose head is cached. Return false if the parser must read it."""
        known = self._owner.cached_head
        if known is None or (body := known.read(data)) is None:
            return False
        handler = self._complete(request, keep=True)
        if handler is not None:
            handler.on_head(known.parsed, body, True)
        return True

    # Responses that the parser reads

    def _parse(self, request: UpstreamRequest, data: bytes, first: bool) -> None:
        parser = self._parser
        if parser is None:
            parser = self._parser = ResponseParser()
        if first:
            parser.expect(request.method == "HEAD")
        problem = parser.feed(data)
        if parser.phase is _HEAD:
            if problem is not None:
                self._fail(UpstreamError(problem))
            return
        body, keeps_alive = parser.take_body(), parser.keeps_alive
        ended = parser.phase is not _BODY
        if ended:
            handler = self._complete(request, keeps_alive)
        else:
            handler = request.handler
            self._deadline.set(self._owner.idle_timeout)
        if self._phase is _HEAD:
            self._phase = _BODY
            head = parser.head()
            if first and keeps_alive and ended:
                self._remember(data, head)
            if handler is not None:
                handler.on_head(head, body, ended)
            if head.is_stream and self.current is request:
                self._acknowledge_less()
        elif handler is not None and (body or ended):
            handler.on_body(body, ended)
        if ended:
            return
        if problem is not None:
            self._fail(UpstreamError(problem))
        elif parser.between_chunks and self.current is request and data.endswith(END):
            # From here on chunks may be forwarded unparsed: a line, its chunk and the received data end here.
            # At most the next chunk's size could have begun. After its whole line, the chunk would be open.
            self._forwarder = request.forwarder

    def _remember(self, data: bytes, head: ResponseHead) -> None:
        if head.status in WITHOUT_BODY or head.status == 500 or not data.startswith(b"HTTP/1.1 %d" % head.status):
            return  # or an interim response precedes it
        owner = self._owner
        owner.cached_head = CachedHead.of(data, head.without_length(), dated=True) or owner.cached_head

    def _acknowledge_less(self) -> None:
        """Acknowledge every other segment of a stream instead of each one, which saves processor time."""
        if _QUICKACK < 0:
            return
        connected = self._transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 0)

    # The end of a response

    def _complete(self, request: UpstreamRequest, keep: bool) -> ResponseHandler | None:
        """Release a complete response's request, and return its handler. `keep`: the connection may serve another."""
        self.current = None
        handler, request.handler, request.connection = request.handler, None, None
        request.answered_on = self
        self._deadline.clear()
        if self._paused:
            self.resume()
        if keep and not self._transport.get_write_buffer_size():
            self._owner.keep(self)
        else:
            self._deadline.close()
            self._transport.close()
        return handler

    def _fail(self, error: UpstreamError, unanswered: bool = False) -> None:
        request, self.current, self._forwarder = self.current, None, None
        self._deadline.close()
        self._transport.abort()
        if request is not None:
            self._owner.failed(request, error, unanswered)

    def _lives(self) -> bool:
        """Return whether chunks were forwarded since the last check."""
        quiet, self._quiet = self._quiet, True
        return not quiet

    def _late(self) -> None:
        self._fail(UpstreamTimeoutError(f"no byte within {self._owner.idle_timeout:g} s"))
