"""gRPC over HTTP/2: a call is a stream, and a message is a prefix of five bytes and its content.

It follows gRPC's PROTOCOL-HTTP2.md. Compression is not offered.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping
from functools import partial
from struct import Struct
from typing import Any, Final, Protocol, TypeAlias
from urllib.parse import quote

import structlog

from router.picker.http2.connection import Http2Connection, PeerAllowances
from router.picker.http2.headers import RequestHeaders, literal
from router.picker.http2.stream import Stream, StreamHandler

# Status codes of gRPC.
OK: Final = 0
NOT_FOUND: Final = 5
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
log = structlog.get_logger()
_PREFIX: Final = Struct(">BL")
_PREFIX_BYTES: Final = 5
_STATUS_200: Final = b"\x88"  # the eighth header of HPACK's own table
_HEADERS: Final = _STATUS_200 + literal(b"content-type", b"application/grpc")
_ENDED_WELL: Final = literal(b"grpc-status", b"0")
_NOT_GRPC: Final = literal(b":status", b"415")
_REASON_BYTES: Final = 120
_BACKLOG: Final = 2048


class Call(Protocol):
    """The peer's end of a call."""

    def send(self, *messages: bytes) -> None:
        """Send messages."""

    def end(self, status: int = OK, reason: str = "") -> None:
        """End the call after all sent messages. No more messages are received, and the handler is closed."""


class CallHandler(Protocol):
    """Handles one call."""

    def received(self, message: bytes) -> None:
        """Receive a message of the peer."""

    def peer_ended(self) -> None:
        """Called when the peer has sent its last message."""

    def closed(self) -> None:
        """Called once, when the call has ended in any way."""


# Creates the handler of a new call.
Method: TypeAlias = Callable[[Call], CallHandler]
# The methods of a server by their paths, `/package.Service/Method`.
Methods: TypeAlias = Mapping[str, Method]


class GrpcServer:
    """Serves methods by gRPC."""

    def __init__(self, methods: Methods, largest_message: int) -> None:
        """Create a server. A call with a message of more than `largest_message` bytes ends with RESOURCE_EXHAUSTED."""
        self._methods = {path.encode(): method for path, method in methods.items()}
        self._largest = largest_message
        self._connections: set[Http2Connection] = set()
        self._allowances = PeerAllowances()
        self._server: asyncio.AbstractServer | None = None

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None) -> int:
        """Listen, and return the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        made = partial(Http2Connection, self._accept, self._connections, self._allowances, loop)
        server: Any = await loop.create_server(made, host, port, ssl=tls, backlog=_BACKLOG)  # uvloop has its own type
        self._server = server
        return int(server.sockets[0].getsockname()[1])

    async def stop(self, seconds: float) -> None:
        """Refuse new calls, and abort the remaining ones after `seconds` seconds."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.drain()
        await self._until_closed(seconds)
        for connection in list(self._connections):
            connection.abort()
        await self._until_closed(None)

    async def _until_closed(self, seconds: float | None) -> None:
        closed = [connection.closed for connection in self._connections]
        if closed:
            await asyncio.wait(closed, timeout=seconds)

    def _accept(self, headers: RequestHeaders, stream: Stream) -> StreamHandler:
        return _GrpcCall(headers, stream, self._methods, self._largest)


class _GrpcCall:
    """A call over an HTTP/2 stream: it splits received bytes into messages, and encodes sent messages."""

    __slots__ = ("_handler", "_largest", "_missing", "_parts", "_stream")

    def __init__(self, headers: RequestHeaders, stream: Stream, methods: dict[bytes, Method], largest: int) -> None:
        self._stream = stream
        self._largest = largest
        self._parts: list[bytes] = []  # received bytes of an incomplete message
        self._missing = 0  # bytes that must arrive before `_parts` are parsed
        self._handler: CallHandler | None = None
        if not headers.is_grpc:
            stream.end(_NOT_GRPC)
            return
        method = methods.get(headers.path)
        if method is None:
            self.end(UNIMPLEMENTED, f"no method {headers.path.decode('latin-1')}")
        else:
            self._handler = method(self)

    # Calls of the handler

    def send(self, *messages: bytes) -> None:
        """Send messages in as few frames as possible."""
        stream = self._stream
        stream.begin(_HEADERS)
        stream.send(b"".join([part for each in messages for part in (_PREFIX.pack(0, len(each)), each)]))

    def end(self, status: int = OK, reason: str = "") -> None:
        stream = self._stream
        if status == OK:
            stream.begin(_HEADERS)
            stream.end(_ENDED_WELL)
            return
        trailers = literal(b"grpc-status", b"%d" % status) + literal(b"grpc-message", _escaped(reason))
        stream.end(trailers if stream.begun else _HEADERS + trailers)

    # Events of the stream

    def data(self, data: bytes) -> None:
        """Receive bytes of messages."""
        parts = self._parts
        if not parts and len(data) >= _PREFIX_BYTES:
            compressed, size = _PREFIX.unpack_from(data)
            if size == len(data) - _PREFIX_BYTES and not compressed:  # the usual case: exactly one message
                self._receive(data[_PREFIX_BYTES:])
                return
        parts.append(data)
        self._missing -= len(data)
        if self._missing <= 0:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            self._parts = []
            self._split(data)

    def _split(self, data: bytes) -> None:
        """Receive all complete messages in `data`, which begins with a message, and keep the rest."""
        at, end = 0, len(data)
        while end - at >= _PREFIX_BYTES and not self._stream.ended:
            compressed, size = _PREFIX.unpack_from(data, at)
            if compressed:
                self.end(UNIMPLEMENTED, "compressed messages are not supported")
                return
            if size > self._largest:
                self.end(RESOURCE_EXHAUSTED, f"a message of {size} bytes; at most {self._largest} are allowed")
                return
            if end - at - _PREFIX_BYTES < size:
                self._missing = size + _PREFIX_BYTES - (end - at)
                break
            at += _PREFIX_BYTES + size
            self._receive(data[at - size : at])
        else:
            self._missing = _PREFIX_BYTES - (end - at)
        if at < end:
            self._parts = [data[at:] if at else data]

    def _receive(self, message: bytes) -> None:
        handler = self._handler
        if handler is None or self._stream.ended:
            return
        try:
            handler.received(message)
        except Exception:
            log.exception("a call failed")
            self.end(INTERNAL, "the picker failed")

    def ended(self) -> None:
        """Called when the peer has ended its side of the stream."""
        if self._handler is not None and not self._stream.ended:
            if self._parts:
                self.end(INTERNAL, "the last message is not complete")
            else:
                self._handler.peer_ended()

    def closed(self) -> None:
        """Called when the stream has ended."""
        handler, self._handler = self._handler, None
        self._parts = []
        if handler is not None:
            try:
                handler.closed()
            except Exception:
                log.exception("a call failed at its end")


def _escaped(reason: str) -> bytes:
    return quote(reason[: _REASON_BYTES // 3], safe=" !\"#$&'()*+,/:;<=>?@[]").encode()[:_REASON_BYTES]
