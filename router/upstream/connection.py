"""One connection to a worker: a request at a time, and its answer as it comes.

The answer is read by llhttp (`response_parser`), except where that is not needed. Where llhttp stands between two
chunks it need not see those that come whole: they change nothing of where it stands. Nor need it see a head that it has
read before, until something comes that is no whole chunk.
"""

from __future__ import annotations

import asyncio
import socket
from enum import Enum, auto
from typing import Final

from router.http.cached_head import CachedHead
from router.http.chunks import END, body_size
from router.http.event_loop import Deadline
from router.http.headers import WITHOUT_BODY, ResponseHead
from router.upstream.request import RequestConnection, UpstreamRequest
from router.upstream.response_handler import ChunkForwarder, ResponseHandler, UpstreamError, UpstreamTimeoutError
from router.upstream.response_parser import Framing, ResponseParser, ResponsePhase

_QUICKACK: Final[int] = getattr(socket, "TCP_QUICKACK", -1)  # Linux alone has it


class ConnectionState(Enum):
    """FRESH: made for its first request. IDLE: kept for the next one. REUSED: it has a later one."""

    FRESH = auto()
    IDLE = auto()
    REUSED = auto()


# Members of an enumeration are looked up in it each time.
_WAITING: Final = ResponsePhase.WAITING
_HEAD: Final = ResponsePhase.HEAD
_BODY: Final = ResponsePhase.BODY


class ConnectionOwner:
    """Who keeps the connections to a worker. `idle_timeout`: seconds that a worker may say nothing.

    `known_head`: the head of the worker's last response that was received at once.
    """

    def __init__(self, idle_timeout: float) -> None:
        self.idle_timeout = idle_timeout
        self.known_head: CachedHead[ResponseHead] | None = None

    def opened(self, connection: UpstreamConnection) -> None:
        """A connection is made."""
        raise NotImplementedError

    def closed(self, connection: UpstreamConnection) -> None:
        """A connection is closed."""
        raise NotImplementedError

    def keep(self, connection: UpstreamConnection) -> None:
        """A connection has nothing to do, and another request can follow on it."""
        raise NotImplementedError

    def failed(self, request: UpstreamRequest, error: UpstreamError, unheard: bool) -> None:
        """A request's connection failed. `unheard`: it had been used before, and no byte of this answer came."""
        raise NotImplementedError


class UpstreamConnection(RequestConnection):
    """A connection to a worker, as asyncio's protocols are. `current`: the request it is used for; None while idle."""

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
        self.current: UpstreamRequest | None = None
        self.state = ConnectionState.FRESH
        self.idle_since = 0.0
        self._owner = owner
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._deadline = Deadline(asyncio.get_running_loop(), self._late, self._lives)
        self._paused = False
        self._quiet = True  # since the last look of the deadline
        # The answer: how much of its head and body the request's handler got.
        self._phase = _WAITING
        self._parser: ResponseParser | None = None  # once there is an answer that it has to read
        self._forwarder: ChunkForwarder | None = None

    def send(self, request: UpstreamRequest) -> None:
        """Write a request; its handler gets the answer."""
        self.current = request
        request.connecting = None
        request.connection = self
        self._phase = _WAITING
        self._quiet = True
        if request.body:
            self._transport.writelines((request.request, request.body))  # one call of the system's
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
            self._transport.abort()  # nothing was asked
            return
        first = self._phase is _WAITING
        if first:
            self._phase = _HEAD
            if request.method != "HEAD" and self._begins_as_known(request, data):
                return
        self._parse(request, data, first)

    def eof_received(self) -> None:
        """Nothing more comes: asyncio closes the connection."""

    def pause_writing(self) -> None:
        """A request is in the transport's hands, however large."""

    def resume_writing(self) -> None:
        """The same."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.close()
        self._owner.closed(self)
        parser, self._parser = self._parser, None
        if parser is not None:
            parser.close()
        if self.current is None:
            return
        if self._phase is _BODY and parser is not None and parser.framing is Framing.UNTIL_CLOSE and exc is None:
            handler = self._complete(self.current, keep=False)
            if handler is not None:
                handler.on_body(b"", True)  # the end of the connection is that of the answer
            return
        error = UpstreamError(str(exc) or type(exc).__name__ if exc else "the worker hung up")
        self._fail(error, unheard=self.state is ConnectionState.REUSED and self._phase is _WAITING)

    # Answers whose head was read before

    def _begins_as_known(self, request: UpstreamRequest, data: bytes) -> bool:
        """Pass on a response whose head is cached and that was received at once; False leaves it to the parser."""
        known = self._owner.known_head
        if known is None or (body := known.read(data)) is None:
            return False
        handler = self._complete(request, keep=True)
        if handler is not None:
            handler.on_head(known.said, body, True)
        return True

    # Answers that the parser reads

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
            # From here on chunks may be forwarded as they come: a line, its chunk and what was read end here. Only the
            # size of the next chunk could have begun; when that line came whole, the chunk is open again.
            self._forwarder = request.forwarder

    def _remember(self, data: bytes, head: ResponseHead) -> None:
        """Cache the head of a response that was received at once: the next response may begin in the same way."""
        if head.status in WITHOUT_BODY or not data.startswith(b"HTTP/1.1 %d" % head.status):
            return  # or an interim response precedes it
        owner = self._owner
        owner.known_head = CachedHead.of(data, head.without_length(), dated=True) or owner.known_head

    def _acknowledge_less(self) -> None:
        """Have every other segment of a stream acknowledged, not each one as it is read, which takes much of the time.

        Where they come seldom Linux goes back to each by itself.
        """
        if _QUICKACK < 0:
            return
        connected = self._transport.get_extra_info("socket")
        if connected is not None:
            connected.setsockopt(socket.IPPROTO_TCP, _QUICKACK, 0)

    # The end of an answer

    def _complete(self, request: UpstreamRequest, keep: bool) -> ResponseHandler | None:
        """All of an answer came: let go of its request before its handler, which this returns, gets the last of it.

        `keep`: another request may follow on the connection.
        """
        self.current = None
        handler, request.handler, request.connection = request.handler, None, None
        self._deadline.clear()
        if self._paused:
            self.resume()
        if keep and not self._transport.get_write_buffer_size():
            self._owner.keep(self)
        else:
            self._deadline.close()
            self._transport.close()
        return handler

    def _fail(self, error: UpstreamError, unheard: bool = False) -> None:
        request, self.current, self._forwarder = self.current, None, None
        self._deadline.close()
        self._transport.abort()
        if request is not None:
            self._owner.failed(request, error, unheard)

    def _lives(self) -> bool:
        """True if chunks passed since the last look."""
        quiet, self._quiet = self._quiet, True
        return not quiet

    def _late(self) -> None:
        self._fail(UpstreamTimeoutError(f"no byte within {self._owner.idle_timeout:g} s"))
