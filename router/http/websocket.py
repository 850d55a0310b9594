"""WebSockets (RFC 6455): one connection of a relay, and what all connections share.

    client ──frames──▶ WebSocketPeer ──▶ WebSocketRelay ──▶ WebSocketPeer ──frames──▶ worker

A worker's frames are passed on as they are received, so that nothing is buffered but a part of one frame. A client's
messages are passed on when they are whole, because the relay reads them.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from sys import getsizeof
from typing import Final

from mypy_extensions import trait
from websockets.exceptions import ProtocolError
from websockets.frames import CloseCode, Frame, Opcode
from websockets.protocol import CLIENT, SERVER, Protocol, State

from router.http.allowance import Allowance, Allowances
from router.http.arriving import ArrivingBytes, ArrivingMessage
from router.http.headers import ResponseHead, length_of
from router.http.websocket_handshake import SWITCHING, accept_value, response_head

# The largest message: OpenAI's largest event has 15 MiB.
MOST_BYTES: Final = 16 * 2**20
# How long the other side may take for its part of a closing handshake.
_CLOSE_SECONDS: Final = 5.0
_MOST_OF_A_HEAD: Final = 64 * 1024
# Seconds that all WebSockets may use at once, and bytes that are parsed between two looks at the clock. Then the event
# loop continues with other connections.
_TURN: Final = 0.001
_SLICE: Final = 2048
_MOST_UNREAD: Final = 64 * 1024  # received bytes that wait for their turn while more are read
# Tokens for frames without data, pings among them: most and least of a new connection, and an address's tokens a
# second. A frame with data earns one.
_IDLE_FRAMES: Final = (1_000, 100.0, 200.0)
_clock: Final = time.perf_counter


@trait
class WebSocketRelay:
    """The owner of two peers."""

    def received(self, peer: WebSocketPeer, frames: list[Frame]) -> None:
        """Called with frames of data: with whole messages of a client, and with the frames of a worker."""
        raise NotImplementedError

    def ended(self, peer: WebSocketPeer, code: int | None, reason: str) -> None:
        """Called when a peer closes its WebSocket, or its connection breaks; None: it gives no code."""
        raise NotImplementedError

    def paused(self, peer: WebSocketPeer, is_paused: bool) -> None:
        """Called when a peer stops reading, and when it continues."""
        raise NotImplementedError


class SharedWebSockets:
    """The turns of all WebSockets of a process, their account of arriving bytes, and their budgets of frames.

    `stall_timeout`: how long a peer may read nothing, in seconds.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, arriving: ArrivingBytes, stall_timeout: float) -> None:
        self.loop = loop
        self.arriving = arriving
        self.stall_timeout = stall_timeout
        self.idle_frames = Allowances(*_IDLE_FRAMES)
        self._waiting: deque[WebSocketPeer] = deque()

    def join(self, peer: WebSocketPeer) -> None:
        """Give a peer its turns, until it has nothing to do. All peers together use a millisecond at once."""
        if not self._waiting:
            self.loop.call_soon(self._run)
        self._waiting.append(peer)

    def _run(self) -> None:
        until = _clock() + _TURN
        try:
            while self._waiting:
                peer = self._waiting.popleft()
                if peer.take_turn(until):
                    self._waiting.append(peer)
                if _clock() >= until:
                    break
        finally:
            if self._waiting:
                self.loop.call_soon(self._run)


class WebSocketPeer(ArrivingMessage):
    """One connection of a relay: a protocol of asyncio's. `lost`: the connection is closed.

    Received bytes wait for the peer's turn, and while a side does not read: the other one, or this one its answers.
    """

    def __init__(self, relay: WebSocketRelay, is_client: bool, shared: SharedWebSockets) -> None:
        """Create a peer. `is_client`: the router is the WebSocket's client, and the peer its server."""
        self.lost = False
        self._relay = relay
        self._shared = shared
        self._protocol = Protocol(CLIENT if is_client else SERVER, state=State.OPEN, max_size=MOST_BYTES)
        self._transport: asyncio.Transport | None = None
        self._idle_frames: Allowance | None = None
        self._closing: asyncio.TimerHandle | None = None
        self._ended = False
        # Received bytes, and how many of them the parser has.
        self._unread = b""
        self._parsed = 0
        self._waits = self._eof = False  # for its turn; after the last byte
        # The beginning of a client's message, which is passed on when it is whole.
        self._gathers = not is_client
        self._message = bytearray()
        self._opcode = Opcode.CONT
        self._counted = 0
        # Why received bytes wait: the other side does not take them; the peer does not read what it is sent.
        self._held_back = is_client  # until the client's handshake has ended
        self._full = self._reading_paused = False
        self._stall: asyncio.TimerHandle | None = None
        # During the handshake with a server:
        self._answer: asyncio.Future[ResponseHead] | None = shared.loop.create_future() if is_client else None
        self._beginning = b""
        self.refusal = b""  # the beginning of the body of an answer that is not 101

    # The handshake with a server

    async def handshake(self, request: bytes, key: bytes) -> ResponseHead:
        """Send a request with this key, and return the answer's head. Raises ConnectionError, ValueError."""
        assert self._transport is not None
        assert self._answer is not None
        self._transport.write(request)
        head = await self._answer
        if head.status == SWITCHING and head.first(b"sec-websocket-accept").strip() != accept_value(key):
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
            read = response_head(head)
        except ValueError as error:
            answer.set_exception(error)
            return
        if read.status == SWITCHING:
            self._answer, self._beginning = None, b""
            answer.set_result(read)
            if rest:
                self.data_received(rest)
        elif len(rest) >= min(length_of(read.length), _MOST_OF_A_HEAD):
            self.refusal = rest[:_MOST_OF_A_HEAD]
            answer.set_result(read)

    # What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        name = transport.get_extra_info("peername")
        self._idle_frames = self._shared.idle_frames.connected(str(name[0]) if isinstance(name, tuple) else "")

    def data_received(self, data: bytes) -> None:
        if self._answer is not None:
            self._read_answer(self._answer, data)
            return
        self._unread = self._unread[self._parsed :] + data
        self._parsed = 0
        self._join()
        self._count()

    def eof_received(self) -> bool:
        self._eof = True
        if not self._unread:
            self._end_reading()
        return bool(self._unread)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self.lost = True
        for timer in (self._closing, self._stall):
            if timer is not None:
                timer.cancel()
        if self._idle_frames is not None:
            self._idle_frames.close()
        answer = self._answer
        if answer is not None:
            if not answer.done():
                answer.set_exception(ConnectionError("the worker closed the connection in the handshake"))
        elif not self._unread and not self._held_back:
            self._lost()
        self._full = False
        self._join()  # what was received is passed on first
        self._count()

    def pause_writing(self) -> None:
        self._full = True
        self._count()
        if self._transport is not None:
            self._stall = self._shared.loop.call_later(self._shared.stall_timeout, self._transport.abort)
        self._relay.paused(self, True)

    def resume_writing(self) -> None:
        self._full = False
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        self._join()
        self._count()
        self._relay.paused(self, False)

    # Turns

    @property
    def _blocked(self) -> bool:
        """True while received bytes must wait for a side that does not read."""
        return self._held_back or self._full

    def _join(self) -> None:
        if self._unread and not self._waits and not self._blocked:
            self._waits = True
            self._shared.join(self)

    def take_turn(self, until: float) -> bool:
        """Work on received bytes until a time of the clock. Return whether to have another turn."""
        while self._unread and not self._blocked:
            end = self._parsed + _SLICE
            self._parse(self._unread[self._parsed : end])
            self._parsed = end
            if end >= len(self._unread):
                self._unread, self._parsed = b"", 0
            elif _clock() >= until:
                break
        if not self._unread:
            if self._eof:
                self._end_reading()
            if self.lost:
                self._lost()
        self._flush()
        self._count()
        self._waits = bool(self._unread) and not self._blocked
        return self._waits

    def _parse(self, data: bytes) -> None:
        """Parse bytes, and pass on the frames that they complete."""
        protocol = self._protocol
        protocol.receive_data(data)
        passed: list[Frame] = []
        closes = False
        for event in protocol.events_received():
            assert isinstance(event, Frame)
            is_data = event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
            assert self._idle_frames is not None
            if is_data and event.data:
                self._idle_frames.earn(1)
            elif not self._idle_frames.take():
                self.fail(CloseCode.POLICY_VIOLATION, "too many frames without data")
                return
            if is_data:
                whole = self._gathered(event) if self._gathers else event
                if whole is not None:
                    passed.append(whole)
            elif event.opcode is Opcode.CLOSE:
                closes = True
        if passed and not self._ended:
            self._relay.received(self, passed)
        if closes:
            closed = protocol.close_rcvd
            self._end(None if closed is None else closed.code, "" if closed is None else closed.reason)
        elif not self._ended and protocol.parser_exc is not None and not isinstance(protocol.parser_exc, EOFError):
            self._end(CloseCode.PROTOCOL_ERROR, "a frame is invalid or too large")

    def _gathered(self, frame: Frame) -> Frame | None:
        """Return a frame with a whole message; None if it has not ended."""
        if frame.fin and not self._message and frame.opcode is not Opcode.CONT:
            return frame
        if frame.opcode is not Opcode.CONT:
            self._opcode = frame.opcode
        self._message += frame.data
        if not frame.fin:
            return None
        message, self._message = self._message, bytearray()
        return Frame(self._opcode, message)

    def _end_reading(self) -> None:
        if not self._protocol.reader.eof:
            self._protocol.receive_eof()
            self._flush()
            if self._transport is not None and not self.lost:
                self._transport.close()

    def _count(self) -> None:
        """Count the bytes that the peer holds, and read only if what was received is soon worked on."""
        transport, size = self._transport, 0
        if transport is not None and not self.lost and not transport.is_closing():
            pauses = self._answer is None and (self._blocked or len(self._unread) - self._parsed > _MOST_UNREAD)
            if pauses != self._reading_paused:
                self._reading_paused = pauses
                (transport.pause_reading if pauses else transport.resume_reading)()
            size = transport.get_write_buffer_size() if self._full else 0
        unfinished = self._protocol.reader.buffer
        if unfinished or self._message:
            size += getsizeof(unfinished) + getsizeof(self._message)
        size += len(self._unread)
        size += size // 4  # buffers that grow leave gaps in memory
        if size != self._counted:
            self._counted = size
            self._shared.arriving.hold(self, size)

    # What the relay calls

    def send(self, frames: list[Frame]) -> None:
        """Send frames of data, unless the WebSocket is closing."""
        protocol = self._protocol
        try:
            for frame in frames:
                if protocol.state is not State.OPEN:
                    break
                if frame.opcode is Opcode.TEXT:
                    protocol.send_text(frame.data, frame.fin)
                elif frame.opcode is Opcode.BINARY:
                    protocol.send_binary(frame.data, frame.fin)
                else:
                    protocol.send_continuation(frame.data, frame.fin)
        except ProtocolError:
            self.close(CloseCode.PROTOCOL_ERROR, "a fragment is out of order")
        self._flush()

    def hold_back(self, held_back: bool) -> None:
        """Work on no received frames, because the other side does not read; or continue."""
        self._held_back = held_back
        if self.lost and not held_back and not self._unread:
            self._lost()
        self._join()
        self._count()

    def refuse(self) -> None:
        self._counted = 0
        self.fail(CloseCode.TRY_AGAIN_LATER, "too many large messages are being received")
        if self._full:
            self.abort()

    def fail(self, code: CloseCode, reason: str) -> None:
        """Close both sides, and ignore what this one has sent and sends."""
        if self._protocol.state is not State.CLOSED:
            self._protocol.fail(code, reason)
        self._drop()
        self._end(code, reason)

    def close(self, code: int | None, reason: str) -> None:
        """Close the WebSocket, and the connection after the closing handshake or after five seconds."""
        if self.lost or self._transport is None:
            self._drop()
            self._count()
            return
        if self._answer is not None:
            self._transport.abort()
            return
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason)
        self._flush()
        if self._closing is None:
            self._closing = self._shared.loop.call_later(_CLOSE_SECONDS, self._transport.abort)
        self.hold_back(False)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def _end(self, code: int | None, reason: str) -> None:
        if not self._ended:
            self._ended = True
            self._relay.ended(self, code, reason)
            self.close(None, "")

    def _lost(self) -> None:
        self._drop()
        self._end(CloseCode.ABNORMAL_CLOSURE, "")

    def _drop(self) -> None:
        """Release received bytes."""
        self._protocol.reader.discard()
        self._message = bytearray()
        self._unread, self._parsed = b"", 0

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
