"""One HTTP/2 connection (RFC 9113), an asyncio protocol.

    bytes ──▶ frames ──┬─▶ HEADERS, CONTINUATION ──▶ `accept` ──▶ a stream and its handler
                       ├─▶ DATA, RST_STREAM      ──▶ the handler
                       └─▶ SETTINGS, PING, WINDOW_UPDATE, GOAWAY: answered here
    handlers ──▶ collected frames ──▶ one write

A peer cannot use unlimited memory or time. A peer that exceeds one of these limits loses its connection:

- open streams, and bytes of a header block
- frames without progress, and streams that it opens only to reset them
- seconds without reading a response

One file, because all kinds of frames are checked against the same state of the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Final, cast

import structlog

from router.http.allowance import Allowance, Allowances
from router.picker.http2 import frames
from router.picker.http2.frames import HEAD, HEAD_BYTES, Http2Error, frame
from router.picker.http2.headers import MOST_BYTES, HeaderDecoder, RequestHeaders
from router.picker.http2.stream import FrameSender, Stream, StreamHandler

log = structlog.get_logger()

# An Envoy with more concurrent requests opens another connection.
MOST_STREAMS: Final = 4096
_STREAM_WINDOW: Final = 2**20
_WINDOW: Final = 16 * 2**20
_SETTINGS: Final = frames.settings(
    {
        frames.MAX_CONCURRENT_STREAMS: MOST_STREAMS,
        frames.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
        frames.MAX_HEADER_LIST_SIZE: MOST_BYTES,
    }
) + frames.window_update(0, _WINDOW - frames.DEFAULT_WINDOW)
_SETTINGS_ACK: Final = frame(frames.SETTINGS, frames.ACK, 0)

# Limits of an encoded header block: its bytes and its frames.
_BLOCK_BYTES: Final = MOST_BYTES
_BLOCK_FRAMES: Final = 8
# The token bucket for streams that are reset without a response: most and least tokens of a new connection, and tokens
# a second of an address. A stream with a response earns one token.
_RESETS: Final = (MOST_STREAMS, 2.0, 200.0)
# The token bucket for frames without progress, in the same order. A sent DATA frame earns two tokens.
_IDLE_FRAMES: Final = (10_000, 100.0, 2_000.0)
# Seconds that a connection may use at once. Then the event loop continues with other connections.
_TURN: Final = 0.001
# Closed streams that are kept, because frames for them may still arrive.
_REMEMBERED: Final = 256

# Time limits, in ticks of one second.
_TICK: Final = 1.0
_FIRST_BYTES: Final = 10  # for the preface, for the rest of a header block, and for a stream's first bytes
_SILENCE: Final = 10  # until a silent peer receives a ping
_NO_ANSWER: Final = 15  # until a silent connection is closed
_BLOCKED: Final = 30  # for a response that waits for a window, or for the peer to read

_PING_ALIVE: Final = b"kv-alive"
_PING_DRAIN: Final = b"kv-drain"


class PeerAllowances:
    """The token buckets of a server's peers: for resets, and for frames without progress."""

    def __init__(self) -> None:
        self.resets = Allowances(*_RESETS)
        self.idle_frames = Allowances(*_IDLE_FRAMES)


class Http2Connection(asyncio.Protocol):
    """The server's side of one connection, among `connections`. `accept` creates the handler of a peer's stream."""

    def __init__(
        self,
        accept: Callable[[RequestHeaders, Stream], StreamHandler],
        connections: set[Http2Connection],
        allowances: PeerAllowances,
        loop: asyncio.AbstractEventLoop,
        patience: float = _NO_ANSWER,
    ) -> None:
        """Create a connection. `patience`: seconds until a silent one is closed, and of a response that waits."""
        self._patience = patience
        self._blocked_for = max(patience, _BLOCKED)
        self.closed: asyncio.Future[None] = loop.create_future()
        self._accept = accept
        self._connections = connections
        self._loop = loop
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._decoder = HeaderDecoder()
        self._streams: dict[int, Stream] = {}
        self._untouched: set[Stream] = set()  # streams without data
        self._closed: dict[int, bool] = {}  # recently closed streams, and whether they were reset
        self._last = 0
        # The incomplete frame; the incomplete header block with its stream, flags and parts.
        self._rest = b""
        self._greeted = self._set = False
        self._block: tuple[int, int, list[bytes]] | None = None
        self._received = 0
        self._waits = False  # for its next turn, with received bytes
        self._allowances = allowances
        self._resets: Allowance = None  # type: ignore[assignment]
        self._idle_frames: Allowance = None  # type: ignore[assignment]
        self._sender: FrameSender = None  # type: ignore[assignment]
        # The end of the connection.
        self._draining = self._last_sent = self._over = False
        self._ticker: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._age = self._silent = self._unread_for = 0

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the connection of a peer: send the settings."""
        self._transport = cast(asyncio.Transport, transport)
        address = str((transport.get_extra_info("peername") or ("",))[0])
        self._resets = self._allowances.resets.connected(address)
        self._idle_frames = self._allowances.idle_frames.connected(address)
        self._sender = FrameSender(self._transport, self._loop, partial(self._idle_frames.earn, 2))
        encrypted = transport.get_extra_info("ssl_object")
        if encrypted is not None and encrypted.selected_alpn_protocol() != "h2":
            self._over = True
            self._transport.close()
            return
        self._connections.add(self)
        self._ticker = self._loop.call_later(_TICK, self._tick)
        self.put(_SETTINGS)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Close all streams, because the connection is lost."""
        self._over = True
        self._connections.discard(self)
        self._resets.close()
        self._idle_frames.close()
        if not self.closed.done():
            self.closed.set_result(None)
        for timer in (self._ticker, self._ending):
            if timer is not None:
                timer.cancel()
        streams, self._streams = self._streams, {}
        self._untouched.clear()
        self._sender.close()
        for stream in streams.values():
            stream.close()

    def pause_writing(self) -> None:
        """Stop sending, because the peer does not read."""
        self._sender.unread = True

    def resume_writing(self) -> None:
        """Continue sending, because the peer reads again."""
        self._sender.unread, self._unread_for = False, 0
        self._sender.go_on()

    def drain(self) -> None:
        """Announce the end of the connection, and close it after the last stream. The peer then opens another."""
        if self._draining or self._over:
            return
        self._draining = True
        self.put(frames.goaway(frames.LARGEST_WINDOW, frames.NO_ERROR))
        self.put(frame(frames.PING, 0, 0, _PING_DRAIN))
        self._age = 0

    def shutdown(self) -> None:
        """Close the connection after its streams. Called when the server stops."""
        self.drain()

    def abort(self) -> None:
        """Close the connection without waiting for its streams."""
        self._over = True
        self._transport.abort()

    def _drained(self) -> None:
        """Refuse new streams, because the peer has read the announcement and opens them on another connection."""
        if self._draining and not self._last_sent:
            self._last_sent = True
            self.put(frames.goaway(self._last, frames.NO_ERROR))
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self._last_sent and not self._streams and not self._over:
            self._sender.flush()
            self._over = True
            self._transport.close()

    def _fail(self, error: Http2Error) -> None:
        log.warning("closed an HTTP/2 connection", reason=str(error), code=error.code)
        self.put(frames.goaway(self._last, error.code, str(error)))
        self._sender.flush()
        self._over = True
        self._transport.close()
        self._ending = self._loop.call_later(_TICK, self._transport.abort)  # the peer may not read the GOAWAY

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(_TICK, self._tick)
        self._age += 1
        self._silent += 1
        if self._sender.unread:
            self._unread_for += 1
        waiting_to_begin = not self._set or self._block is not None
        if (
            self._silent >= self._patience
            or self._unread_for >= self._blocked_for
            or (waiting_to_begin and self._age > _FIRST_BYTES)
        ):
            self.abort()
            return
        if self._silent == _SILENCE:
            self.put(frame(frames.PING, 0, 0, _PING_ALIVE))
        for each in list(self._untouched):
            each.waited += 1
            if each.waited > _FIRST_BYTES:
                each.reset(frames.CANCEL)
        for blocked in list(self._sender.blocked):
            blocked.waited += 1
            if blocked.waited > self._blocked_for:
                blocked.reset(frames.ENHANCE_YOUR_CALM)
        if self._draining:
            self._drained()

    # Sending

    def put(self, data: bytes) -> None:
        """Send frames of this connection or its streams."""
        self._sender.put(data)

    def leave(self, stream: Stream, reset: bool = False) -> None:
        """Remove an ended stream. `reset`: it was reset."""
        if self._streams.pop(stream.id, None) is None:
            return
        self._untouched.discard(stream)
        self._sender.blocked.pop(stream, None)
        self._closed[stream.id] = reset
        if len(self._closed) > _REMEMBERED:
            del self._closed[next(iter(self._closed))]
        if stream.begun:
            self._resets.earn(1)
        stream.close()
        self._close_when_idle()

    # Receiving

    def data_received(self, data: bytes) -> None:
        """Receive bytes of the peer."""
        if self._over:
            return
        self._silent = 0
        if self._rest:
            data = self._rest + data
            self._rest = b""
        at = 0
        try:
            if not self._greeted:
                if not data.startswith(frames.PREFACE[: len(data)]):
                    raise Http2Error(frames.PROTOCOL_ERROR, "this connection supports only HTTP/2")
                if len(data) < len(frames.PREFACE):
                    self._rest = data
                    return
                self._greeted, at = True, len(frames.PREFACE)
            self._read(data, at)
        except Http2Error as error:
            self._fail(error)
        except Exception:
            log.exception("an HTTP/2 connection failed")
            self._fail(Http2Error(frames.INTERNAL_ERROR, "the service failed"))
        self._sender.flush()

    def _read(self, data: bytes, at: int) -> None:
        end = len(data)
        turn_ends = monotonic() + _TURN
        while end - at >= HEAD_BYTES and not self._over:
            if monotonic() > turn_ends:
                self._wait_for_turn()
                break
            high, low, kind, flags, number = HEAD.unpack_from(data, at)
            size = high << 16 | low
            if size > frames.DEFAULT_FRAME:
                raise Http2Error(frames.FRAME_SIZE_ERROR, "a frame of more than 16384 bytes")
            begins = at + HEAD_BYTES
            if end - begins < size:
                break
            at = begins + size
            self._receive(kind, flags, number & frames.STREAM_BITS, data[begins:at])
        self._rest = data[at:] if at < end else b""

    def _wait_for_turn(self) -> None:
        self._waits = True
        self._transport.pause_reading()
        self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Continue reading, after other connections had their turn."""
        if self._over:
            return
        self._waits = False
        self.data_received(b"")
        if not self._waits and not self._over:
            self._transport.resume_reading()

    def _receive(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or number != self._block[0]):
            raise Http2Error(frames.PROTOCOL_ERROR, "a header block is interrupted")
        if not self._set and (kind != frames.SETTINGS or flags & frames.ACK):
            raise Http2Error(frames.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if kind == frames.DATA:
            self._receive_data(flags, number, payload)
        elif kind == frames.HEADERS:
            self._receive_headers(flags, number, payload)
        elif kind == frames.CONTINUATION:
            self._receive_continuation(flags, payload)
        else:
            if not self._idle_frames.take():
                raise Http2Error(frames.ENHANCE_YOUR_CALM, "too many frames without progress")
            self._receive_control(kind, flags, number, payload)

    def _receive_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size
        if self._received > _WINDOW // 2:
            self.put(frames.window_update(0, self._received))
            self._received = 0
        stream = self._streams.get(number)
        if stream is None or stream.peer_ended:
            self._receive_late(number, stream)
            return
        ended = flags & frames.END_STREAM
        stream.received += size
        if stream.received > _STREAM_WINDOW:
            stream.reset(frames.FLOW_CONTROL_ERROR)
            return
        if stream.received > _STREAM_WINDOW // 2 and not ended:
            self.put(frames.window_update(number, stream.received))
            stream.received = 0
        if flags & frames.PADDED:
            payload = frames.unpadded(flags, payload)
        if not stream.count(len(payload), bool(ended)):
            stream.reset(frames.PROTOCOL_ERROR)
            return
        if payload and stream.handler is not None:
            self._touched(stream)
            try:
                stream.handler.data(payload)
            except Exception:
                _fail_stream(stream)
        elif not ended and not self._idle_frames.take():
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "too many frames without data")
        if ended and number in self._streams:
            self._ended(stream)

    def _touched(self, stream: Stream) -> None:
        if stream in self._untouched:
            self._untouched.discard(stream)
            stream.waited = 0

    def _ended(self, stream: Stream) -> None:
        self._touched(stream)
        stream.peer_ended = True
        if stream.handler is not None:
            try:
                stream.handler.ended()
            except Exception:
                _fail_stream(stream)

    def _receive_late(self, number: int, stream: Stream | None) -> None:
        """Handle a frame for a stream that is not open, or whose peer has ended it. Raises Http2Error."""
        if not number or number > self._last or not number % 2:
            raise Http2Error(frames.PROTOCOL_ERROR, "a frame for a stream that was never opened")
        if stream is not None:
            stream.reset(frames.STREAM_CLOSED)
        elif not self._closed.get(number, True):
            raise Http2Error(frames.STREAM_CLOSED, "a frame for a closed stream")
        elif not self._idle_frames.take():  # the peer may have sent it before it read the reset
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "too many frames for reset streams")

    def _receive_headers(self, flags: int, number: int, payload: bytes) -> None:
        payload = frames.unpadded(flags, payload)
        if flags & frames.WITH_PRIORITY:
            if len(payload) < 5:
                raise Http2Error(frames.FRAME_SIZE_ERROR, "HEADERS without the announced priority")
            frames.check_dependency(number, payload)
            payload = payload[5:]
        if not number % 2:
            raise Http2Error(frames.PROTOCOL_ERROR, "HEADERS for a stream that a client cannot open")
        self._block = (number, flags, [payload])
        if flags & frames.END_HEADERS:
            self._receive_block()
        else:
            self._age = 0

    def _receive_continuation(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise Http2Error(frames.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        parts = self._block[2]
        parts.append(payload)
        if len(parts) > _BLOCK_FRAMES or sum(map(len, parts)) > _BLOCK_BYTES:
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "too long a header block")
        if flags & frames.END_HEADERS:
            self._receive_block()

    def _receive_block(self) -> None:
        assert self._block is not None
        number, flags, parts = self._block
        self._block = None
        headers = self._decoder.decode(parts[0] if len(parts) == 1 else b"".join(parts))
        stream = self._streams.get(number)
        if stream is not None:  # trailers, whose content is ignored
            if not flags & frames.END_STREAM:
                raise Http2Error(frames.PROTOCOL_ERROR, "trailers that do not end their stream")
            if stream.peer_ended:
                stream.reset(frames.STREAM_CLOSED)
            elif not headers.are_trailers() or not stream.count(0, True):
                stream.reset(frames.PROTOCOL_ERROR)
            else:
                self._ended(stream)
            return
        if number <= self._last:
            if number not in self._closed:
                raise Http2Error(frames.PROTOCOL_ERROR, "a new stream has a smaller number than the last one")
            self._receive_late(number, None)
            return
        self._last = number
        if len(self._streams) >= MOST_STREAMS or self._last_sent:
            self._refuse(number)
            return
        if not headers.is_request or (flags & frames.END_STREAM and headers.length):
            self._reset_unopened(number, frames.PROTOCOL_ERROR)
            return
        stream = Stream(self, self._sender, number, headers.length)
        self._streams[number] = stream
        self._untouched.add(stream)
        try:
            stream.handler = self._accept(headers, stream)
        except Exception:
            _fail_stream(stream)
        if flags & frames.END_STREAM and number in self._streams:
            self._ended(stream)

    def _refuse(self, number: int) -> None:
        if not self._resets.take():
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "too many refused streams")
        self._reset_unopened(number, frames.REFUSED_STREAM)

    def _reset_unopened(self, number: int, code: int) -> None:
        self._closed[number] = True
        self.put(frames.reset(number, code))

    # Frames about the connection, and about streams as a whole

    def _receive_control(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        frames.check_control(kind, flags, number, payload)
        if kind == frames.WINDOW_UPDATE:
            self._receive_window_update(number, frames.read_long(payload))
        elif kind == frames.RST_STREAM:
            self._receive_reset(number)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._receive_settings(payload)
        elif kind == frames.PING:
            self._receive_ping(flags, payload)
        elif kind == frames.GOAWAY:
            self.drain()
        elif kind == frames.PRIORITY:
            frames.check_dependency(number, payload)
        # Frames of unknown kinds are ignored.

    def _receive_window_update(self, number: int, size: int) -> None:
        stream = self._streams.get(number)
        if number and stream is None:
            if number > self._last:
                raise Http2Error(frames.PROTOCOL_ERROR, "WINDOW_UPDATE for a stream that was never opened")
            return
        if stream is None:
            if not size:
                raise Http2Error(frames.PROTOCOL_ERROR, "WINDOW_UPDATE by 0")
            self._sender.open(size)
            return
        stream.window += size
        if not size or stream.window > frames.LARGEST_WINDOW:
            stream.reset(frames.FLOW_CONTROL_ERROR if size else frames.PROTOCOL_ERROR)
        else:
            self._sender.go_on_with(stream)

    def _receive_reset(self, number: int) -> None:
        if number > self._last:
            raise Http2Error(frames.PROTOCOL_ERROR, "RST_STREAM for a stream that was never opened")
        stream = self._streams.get(number)
        if stream is None:
            return
        answered = stream.begun  # Envoy ends most calls by a reset
        self.leave(stream, reset=True)
        if not answered and not self._resets.take():
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "too many reset streams")

    def _receive_settings(self, payload: bytes) -> None:
        found = dict(frames.read_settings(payload))
        self._sender.frame_size = min(found.get(frames.MAX_FRAME_SIZE, self._sender.frame_size), 2**16)
        self._set = True
        self.put(_SETTINGS_ACK)
        if frames.INITIAL_WINDOW_SIZE in found:
            self._sender.change_windows(found[frames.INITIAL_WINDOW_SIZE], self._streams.values())

    def _receive_ping(self, flags: int, payload: bytes) -> None:
        if not flags & frames.ACK:
            self.put(frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _PING_DRAIN:
            self._drained()


def _fail_stream(stream: Stream) -> None:
    """Log the current exception of a stream's handler, and reset this stream alone."""
    log.exception("an HTTP/2 stream failed", stream=stream.id)
    stream.reset(frames.INTERNAL_ERROR)
