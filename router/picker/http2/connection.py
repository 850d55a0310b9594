"""One HTTP/2 connection, as asyncio's protocols are: RFC 9113.

    bytes ──▶ frames ──┬─▶ HEADERS, CONTINUATION ──▶ `accept` ──▶ a stream and its handler
                       ├─▶ DATA, RST_STREAM      ──▶ the handler
                       └─▶ SETTINGS, PING, WINDOW_UPDATE, GOAWAY: answered here
    handlers ──▶ frames, gathered ──▶ one write

What a peer can make this hold or do is bounded, and a peer that asks for more loses its connection: streams, the bytes
of a header block, frames that get on with nothing, streams that are opened to be reset, answers that are not read.

One file, because every kind of frame is checked against the same state of the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Final, cast

import structlog

from router.picker.http2 import frames
from router.picker.http2.allowance import Allowance, Allowances
from router.picker.http2.frames import HEAD, HEAD_BYTES, Http2Error, frame
from router.picker.http2.headers import MOST_BYTES, HeaderDecoder, RequestHeaders
from router.picker.http2.sender import FrameSender
from router.picker.http2.stream import Stream, StreamHandler

log = structlog.get_logger()

# An Envoy that has more requests for us opens another connection.
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

# Of a header block as it is sent, and the frames it may come in.
_BLOCK_BYTES: Final = MOST_BYTES
_BLOCK_FRAMES: Final = 8
# Streams that a peer may reset unanswered: all that it may have at once, two in any case, and so many a second of an
# address. One that is answered earns another.
_RESETS: Final = (MOST_STREAMS, 2.0, 200.0)
# Frames that get on with nothing: likewise. A frame of DATA that is sent earns two.
_IDLE_FRAMES: Final = (10_000, 100.0, 2_000.0)
# Seconds that a connection may take of one turn of the loop: then others have theirs.
_TURN: Final = 0.001
# Closed streams that are remembered: frames for them may still be on their way.
_REMEMBERED: Final = 256

# All in ticks, which are seconds.
_TICK: Final = 1.0
_FIRST_BYTES: Final = 10  # for the preface, for the rest of a header block, and for a stream's first bytes
_SILENCE: Final = 10  # then it is asked whether it lives
_NO_ANSWER: Final = 15
_BLOCKED: Final = 30  # an answer that waits for its peer's window, or to be read

_PING_ALIVE: Final = b"kv-alive"
_PING_DRAIN: Final = b"kv-drain"


class PeerAllowances:
    """What the peers of a server may ask of it without getting on, by their address."""

    def __init__(self) -> None:
        self.resets = Allowances(*_RESETS)
        self.idle_frames = Allowances(*_IDLE_FRAMES)


class Http2Connection(asyncio.Protocol):
    """Serves the streams that a peer opens. `accept` makes their handlers; `connections` has all that are open."""

    def __init__(
        self,
        accept: Callable[[RequestHeaders, Stream], StreamHandler],
        connections: set[Http2Connection],
        allowances: PeerAllowances,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.closed: asyncio.Future[None] = loop.create_future()
        self._accept = accept
        self._connections = connections
        self._loop = loop
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._decoder = HeaderDecoder()
        self._streams: dict[int, Stream] = {}
        self._untouched: set[Stream] = set()  # nothing came in them yet
        self._closed: dict[int, bool] = {}  # lately, and whether they were reset
        self._last = 0
        # What came of a frame, and of a header block: its stream, flags and parts.
        self._rest = b""
        self._greeted = self._set = False
        self._block: tuple[int, int, list[bytes]] | None = None
        self._received = 0
        self._waits = False  # for its next turn, with what came
        self._allowances = allowances
        self._resets: Allowance = None  # type: ignore[assignment]
        self._idle_frames: Allowance = None  # type: ignore[assignment]
        self._sender: FrameSender = None  # type: ignore[assignment]
        # Its end.
        self._draining = self._last_told = self._over = False
        self._ticker: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._age = self._silent = self._unread_for = 0

    # The connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A peer came."""
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
        """The peer is gone, and so are its streams."""
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
        """The peer does not read."""
        self._sender.unread = True

    def resume_writing(self) -> None:
        """It reads again."""
        self._sender.unread, self._unread_for = False, 0
        self._sender.go_on()

    def drain(self) -> None:
        """Take no new streams soon; close when those that are here are over. The peer is told, and goes elsewhere."""
        if self._draining or self._over:
            return
        self._draining = True
        self.put(frames.goaway(frames.LARGEST_WINDOW, frames.NO_ERROR))
        self.put(frame(frames.PING, 0, 0, _PING_DRAIN))
        self._age = 0

    def abort(self) -> None:
        """Close now."""
        self._over = True
        self._transport.abort()

    def _drained(self) -> None:
        """The peer has read that it should go elsewhere: what it opens from now on it can open again there."""
        if self._draining and not self._last_told:
            self._last_told = True
            self.put(frames.goaway(self._last, frames.NO_ERROR))
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        if self._last_told and not self._streams and not self._over:
            self._sender.flush()
            self._over = True
            self._transport.close()

    def _fail(self, error: Http2Error) -> None:
        log.warning("a connection to the picker is closed", reason=str(error), code=error.code)
        self.put(frames.goaway(self._last, error.code, str(error)))
        self._sender.flush()
        self._over = True
        self._transport.close()
        self._ending = self._loop.call_later(_TICK, self._transport.abort)  # it may not read that

    def _tick(self) -> None:
        """A second has passed."""
        self._ticker = self._loop.call_later(_TICK, self._tick)
        self._age += 1
        self._silent += 1
        if self._sender.unread:
            self._unread_for += 1
        waiting_to_begin = not self._set or self._block is not None
        if (
            self._silent >= _NO_ANSWER
            or self._unread_for >= _BLOCKED
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
            if blocked.waited > _BLOCKED:
                blocked.reset(frames.ENHANCE_YOUR_CALM)
        if self._draining:
            self._drained()

    # What is sent

    def put(self, data: bytes) -> None:
        """Send frames about streams that were opened here, or about the connection."""
        self._sender.put(data)

    def leave(self, stream: Stream, reset: bool = False) -> None:
        """A stream is over."""
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

    # What comes

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
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
                    raise Http2Error(frames.PROTOCOL_ERROR, "this port speaks HTTP/2 for gRPC, and nothing else")
                if len(data) < len(frames.PREFACE):
                    self._rest = data
                    return
                self._greeted, at = True, len(frames.PREFACE)
            self._read(data, at)
        except Http2Error as error:
            self._fail(error)
        except Exception:
            log.exception("a connection to the picker failed")
            self._fail(Http2Error(frames.INTERNAL_ERROR, "the picker failed"))
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
            self._take(kind, flags, number & frames.STREAM_BITS, data[begins:at])
        self._rest = data[at:] if at < end else b""

    def _wait_for_turn(self) -> None:
        self._waits = True
        self._transport.pause_reading()
        self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Others had theirs."""
        if self._over:
            return
        self._waits = False
        self.data_received(b"")
        if not self._waits and not self._over:
            self._transport.resume_reading()

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or number != self._block[0]):
            raise Http2Error(frames.PROTOCOL_ERROR, "a header block is interrupted")
        if not self._set and (kind != frames.SETTINGS or flags & frames.ACK):
            raise Http2Error(frames.PROTOCOL_ERROR, "the first frame is not SETTINGS")
        if kind == frames.DATA:
            self._take_data(flags, number, payload)
        elif kind == frames.HEADERS:
            self._take_headers(flags, number, payload)
        elif kind == frames.CONTINUATION:
            self._take_continuation(flags, payload)
        else:
            if not self._idle_frames.take():
                raise Http2Error(frames.ENHANCE_YOUR_CALM, "too many frames that get on with nothing")
            self._take_control(kind, flags, number, payload)

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._received += size
        if self._received > _WINDOW // 2:
            self.put(frames.window_update(0, self._received))
            self._received = 0
        stream = self._streams.get(number)
        if stream is None or stream.peer_ended:
            self._take_late(number, stream)
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
        if payload and stream.handler is not None:
            self._touched(stream)
            stream.handler.data(payload)
        elif not ended and not self._idle_frames.take():
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "too many frames without data")
        if ended and number in self._streams:
            self._ended(stream)

    def _touched(self, stream: Stream) -> None:
        if stream in self._untouched:
            self._untouched.discard(stream)
            stream.waited = 0

    def _ended(self, stream: Stream) -> None:
        """The peer sends no more in a stream."""
        self._touched(stream)
        stream.peer_ended = True
        if stream.handler is not None:
            stream.handler.ended()

    def _take_late(self, number: int, stream: Stream | None) -> None:
        """Something came in a stream that is not open for it."""
        if not number or number > self._last or not number % 2:
            raise Http2Error(frames.PROTOCOL_ERROR, "a frame of a stream that was never opened")
        if stream is not None:
            stream.reset(frames.STREAM_CLOSED)
        elif not self._closed.get(number, True):
            raise Http2Error(frames.STREAM_CLOSED, "a frame of a stream that is closed")
        elif not self._idle_frames.take():  # it may have been sent before the reset was read
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "too many frames of streams that were reset")

    def _take_headers(self, flags: int, number: int, payload: bytes) -> None:
        payload = frames.unpadded(flags, payload)
        if flags & frames.WITH_PRIORITY:
            if len(payload) < 5:
                raise Http2Error(frames.FRAME_SIZE_ERROR, "HEADERS without their priority")
            frames.check_dependency(number, payload)
            payload = payload[5:]
        if not number % 2:
            raise Http2Error(frames.PROTOCOL_ERROR, "HEADERS of a stream that a client can't open")
        self._block = (number, flags, [payload])
        if flags & frames.END_HEADERS:
            self._take_block()
        else:
            self._age = 0

    def _take_continuation(self, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise Http2Error(frames.PROTOCOL_ERROR, "CONTINUATION without HEADERS before it")
        parts = self._block[2]
        parts.append(payload)
        if len(parts) > _BLOCK_FRAMES or sum(map(len, parts)) > _BLOCK_BYTES:
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "a header block that does not end")
        if flags & frames.END_HEADERS:
            self._take_block()

    def _take_block(self) -> None:
        assert self._block is not None
        number, flags, parts = self._block
        self._block = None
        headers = self._decoder.decode(parts[0] if len(parts) == 1 else b"".join(parts))
        stream = self._streams.get(number)
        if stream is not None:  # trailers, of which there is nothing to learn
            if not flags & frames.END_STREAM:
                raise Http2Error(frames.PROTOCOL_ERROR, "trailers that do not end their stream")
            if stream.peer_ended:
                stream.reset(frames.STREAM_CLOSED)
            else:
                self._ended(stream)
            return
        if number <= self._last:
            if number not in self._closed:
                raise Http2Error(frames.PROTOCOL_ERROR, "a stream that is opened below the last one")
            self._take_late(number, None)
            return
        self._last = number
        if len(self._streams) >= MOST_STREAMS or self._last_told:
            self._refuse(number)
            return
        if not headers.is_request:
            self._reset_unopened(number, frames.PROTOCOL_ERROR)
            return
        stream = Stream(self, self._sender, number)
        self._streams[number] = stream
        self._untouched.add(stream)
        stream.handler = self._accept(headers, stream)
        if flags & frames.END_STREAM and number in self._streams:
            self._ended(stream)

    def _refuse(self, number: int) -> None:
        if not self._resets.take():
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "too many streams that are refused")
        self._reset_unopened(number, frames.REFUSED_STREAM)

    def _reset_unopened(self, number: int, code: int) -> None:
        self._closed[number] = True
        self.put(frames.reset(number, code))

    # Frames about the connection, and about streams as a whole

    def _take_control(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        frames.check_control(kind, flags, number, payload)
        if kind == frames.WINDOW_UPDATE:
            self._take_window_update(number, frames.read_long(payload))
        elif kind == frames.RST_STREAM:
            self._take_reset(number)
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self._take_settings(payload)
        elif kind == frames.PING:
            self._take_ping(flags, payload)
        elif kind == frames.GOAWAY:
            self.drain()
        elif kind == frames.PRIORITY:
            frames.check_dependency(number, payload)
        # Frames of other kinds are passed over.

    def _take_window_update(self, number: int, size: int) -> None:
        stream = self._streams.get(number)
        if number and stream is None:
            if number > self._last:
                raise Http2Error(frames.PROTOCOL_ERROR, "WINDOW_UPDATE of a stream that was never opened")
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

    def _take_reset(self, number: int) -> None:
        if number > self._last:
            raise Http2Error(frames.PROTOCOL_ERROR, "RST_STREAM of a stream that was never opened")
        stream = self._streams.get(number)
        if stream is None:
            return
        answered = stream.begun  # Envoy ends most calls so, when it has what it wants
        self.leave(stream, reset=True)
        if not answered and not self._resets.take():
            raise Http2Error(frames.ENHANCE_YOUR_CALM, "too many streams that are reset")

    def _take_settings(self, payload: bytes) -> None:
        found = dict(frames.read_settings(payload))
        self._sender.frame_size = min(found.get(frames.MAX_FRAME_SIZE, self._sender.frame_size), 2**16)
        self._set = True
        self.put(_SETTINGS_ACK)
        if frames.INITIAL_WINDOW_SIZE in found:
            self._sender.change_windows(found[frames.INITIAL_WINDOW_SIZE], self._streams.values())

    def _take_ping(self, flags: int, payload: bytes) -> None:
        if not flags & frames.ACK:
            self.put(frame(frames.PING, frames.ACK, 0, payload))
        elif payload == _PING_DRAIN:
            self._drained()
