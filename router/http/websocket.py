"""WebSockets (RFC 6455): the headers of the handshake, and one connection of a relay.

    client ──frames──▶ WebSocketPeer ──▶ WebSocketRelay ──▶ WebSocketPeer ──frames──▶ worker

A peer passes frames on as they are received, so that nothing is buffered but a part of one frame.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from hashlib import sha1
from secrets import token_bytes
from typing import Final

from mypy_extensions import trait
from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import CLIENT, SERVER, Protocol, State

from http_api.errors import RequestError
from router.http.headers import LENGTH, Headers, ResponseHead, is_token, length_of, whole_number

_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
PREFIX: Final = b"sec-websocket-"
# The largest message: OpenAI's largest event has 15 MiB.
MOST_BYTES: Final = 16 * 2**20
# How long the other side may take for its part of a closing handshake.
_CLOSE_SECONDS: Final = 5.0
_MOST_OF_A_HEAD: Final = 64 * 1024
_SWITCHING: Final = 101


def accept_value(key: bytes) -> bytes:
    """Return the value of `sec-websocket-accept` for a key."""
    return b64encode(sha1(key + _GUID).digest())


def new_key() -> bytes:
    """Return a value of `sec-websocket-key`."""
    return b64encode(token_bytes(16))


def handshake_key(headers: Headers) -> bytes:
    """Return the key of a client's handshake. Raises RequestError (426) if the request is no handshake."""
    given = dict(headers)
    upgrades = b"websocket" in given.get(b"upgrade", b"").lower()
    key = given.get(b"sec-websocket-key", b"").strip()
    if not upgrades or len(key) != 24 or given.get(b"sec-websocket-version", b"").strip() != b"13":
        raise RequestError("This route is a WebSocket. Connect with version 13 of its protocol.", status=426)
    return key


@trait
class WebSocketRelay:
    """The owner of two peers."""

    def received(self, peer: WebSocketPeer, frame: Frame) -> None:
        """Called with each frame of data."""
        raise NotImplementedError

    def ended(self, peer: WebSocketPeer, code: int | None, reason: str) -> None:
        """Called when a peer closes its WebSocket, or its connection breaks; None: it gives no code."""
        raise NotImplementedError

    def paused(self, peer: WebSocketPeer, is_paused: bool) -> None:
        """Called when a peer stops reading, and when it continues."""
        raise NotImplementedError


class WebSocketPeer:
    """One connection of a relay: a protocol of asyncio's. `lost`: the connection is closed."""

    def __init__(self, relay: WebSocketRelay, is_client: bool, loop: asyncio.AbstractEventLoop) -> None:
        """Create a peer. `is_client`: the router is the WebSocket's client, and the peer its server."""
        self.lost = False
        self._relay = relay
        self._loop = loop
        self._protocol = Protocol(CLIENT if is_client else SERVER, state=State.OPEN, max_size=MOST_BYTES)
        self._transport: asyncio.Transport | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._ended = False
        # During the handshake with a server:
        self._answer: asyncio.Future[ResponseHead] | None = loop.create_future() if is_client else None
        self._beginning = b""
        self.refusal = b""  # the beginning of the body of an answer that is not 101

    # The handshake with a server

    async def handshake(self, request: bytes, key: bytes) -> ResponseHead:
        """Send a request with this key, and return the answer's head. Raises ConnectionError, ValueError."""
        assert self._transport is not None
        assert self._answer is not None
        self._transport.write(request)
        head = await self._answer
        if head.status == _SWITCHING and head.first(b"sec-websocket-accept").strip() != accept_value(key):
            raise ValueError("its handshake has another key")
        return head

    def _read_answer(self, answer: asyncio.Future[ResponseHead], data: bytes) -> None:
        self._beginning += data
        head, found, rest = self._beginning.partition(b"\r\n\r\n")
        if answer.done():
            return
        if not found:
            if len(head) > _MOST_OF_A_HEAD:
                answer.set_exception(ValueError("the head of its handshake is too large"))
            return
        try:
            read = _response_head(head)
        except ValueError as error:
            answer.set_exception(error)
            return
        if read.status == _SWITCHING:
            self._answer, self._beginning = None, b""
            answer.set_result(read)
            if rest:
                self._loop.call_soon(self.data_received, rest)
        elif len(rest) >= min(length_of(read.length), _MOST_OF_A_HEAD):
            self.refusal = rest[:_MOST_OF_A_HEAD]
            answer.set_result(read)

    # What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            self._read_answer(self._answer, data)
            return
        protocol = self._protocol
        protocol.receive_data(data)
        for event in protocol.events_received():
            assert isinstance(event, Frame)
            if event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                self._relay.received(self, event)
            elif event.opcode is Opcode.CLOSE:
                closed = protocol.close_rcvd
                self._end(None if closed is None else closed.code, "" if closed is None else closed.reason)
        if not self._ended and protocol.parser_exc is not None and not isinstance(protocol.parser_exc, EOFError):
            self._end(CloseCode.PROTOCOL_ERROR, "a frame is invalid or too large")
        self._flush()

    def eof_received(self) -> bool:
        self._protocol.receive_eof()
        self._flush()
        return False

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.lost = True
        if self._closing is not None:
            self._closing.cancel()
        answer = self._answer
        if answer is not None and not answer.done():
            answer.set_exception(ConnectionError("the worker closed the connection in the handshake"))
        elif answer is None:
            self._end(CloseCode.ABNORMAL_CLOSURE, "")

    def pause_writing(self) -> None:
        self._relay.paused(self, True)

    def resume_writing(self) -> None:
        self._relay.paused(self, False)

    # What the relay calls

    def send(self, frame: Frame) -> None:
        """Send a frame of data, unless the WebSocket is closing."""
        protocol = self._protocol
        if protocol.state is not State.OPEN:
            return
        try:
            if frame.opcode is Opcode.TEXT:
                protocol.send_text(frame.data, frame.fin)
            elif frame.opcode is Opcode.BINARY:
                protocol.send_binary(frame.data, frame.fin)
            else:
                protocol.send_continuation(frame.data, frame.fin)
        except ProtocolError:
            self.close(CloseCode.PROTOCOL_ERROR, "a fragment is out of order")
        self._flush()

    def read(self, reads: bool) -> None:
        """Read from the connection, or stop reading."""
        if self._transport is not None and not self.lost:
            (self._transport.resume_reading if reads else self._transport.pause_reading)()

    def close(self, code: int | None, reason: str) -> None:
        """Close the WebSocket, and the connection after the closing handshake or after five seconds."""
        if self.lost or self._transport is None:
            return
        self.read(True)
        if self._answer is not None:
            self._transport.abort()
            return
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason)
        self._flush()
        if self._closing is None:
            self._closing = self._loop.call_later(_CLOSE_SECONDS, self._transport.abort)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, code: int | None, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._relay.ended(self, code, reason)
            self.close(None, "")

    def _flush(self) -> None:
        transport = self._transport
        for data in self._protocol.data_to_send():
            if transport is None or self.lost:
                return
            if data:
                transport.write(data)
            elif self._protocol.close_rcvd is not None:
                transport.close()
            # Else the peer may still send, and a reset would cost it the frame that says why. It has time to answer.


def _response_head(data: bytes) -> ResponseHead:
    """Parse the head of a response to a handshake. Raises ValueError."""
    first, *lines = data.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    if (
        not version.startswith(b"HTTP/1.")
        or not rest[:3].isdigit()
        or rest[3:4] not in (b"", b" ")
        or any(b"\n" in line or b"\r" in line or b"\0" in line for line in lines)
    ):
        raise ValueError("its answer to the handshake is not HTTP")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    if not all(is_token(name) for name, _ in headers):
        raise ValueError("its answer to the handshake has an invalid header name")
    head = ResponseHead(int(rest[:3]), headers)
    lengths = {value for name, value in headers if name == LENGTH}
    if len(lengths) > 1 or any(whole_number(length) is None for length in lengths):
        raise ValueError("the length of its answer to the handshake is not one number")
    return head
