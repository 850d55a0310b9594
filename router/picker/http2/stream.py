"""The streams of a connection, and the sender of their frames.

Frames are collected for one write. DATA is sent within the peer's windows, and waits in its stream otherwise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from router.picker.http2 import frames
from router.picker.http2.frames import HEAD, Http2Error


class FrameSender:
    """The sender of one connection.

    - `blocked`: streams with waiting data, in their order.
    - `sent_data`: called for each sent DATA frame.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, sent_data: Callable[[], None]
    ) -> None:
        self.unread = False
        self.blocked: dict[Stream, None] = {}
        self.initial_window = frames.DEFAULT_WINDOW  # of a stream
        self.frame_size = frames.DEFAULT_FRAME
        self._transport = transport
        self._loop = loop
        self._sent_data = sent_data
        self._window = frames.DEFAULT_WINDOW  # of the connection
        self._out: list[bytes] = []
        self._flushing = False
        self._closed = False

    def put(self, data: bytes) -> None:
        """Send frames, in one write with all other frames of this turn of the event loop."""
        self._out.append(data)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Write all collected frames now."""
        self._flushing = False
        if self._out and not self._closed:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def close(self) -> None:
        """Drop all data, at the end of the connection."""
        self._closed = True
        self.blocked.clear()
        self._out.clear()

    def put_data(self, stream: Stream, data: bytes) -> bytes:
        """Send bytes of a stream within its windows. Return the bytes that are not sent."""
        size = len(data)
        window = min(self._window, stream.window)
        if self.unread or (window <= 0 and size):
            return data
        sent = min(size, window)
        most = self.frame_size
        for start in range(0, sent, most):
            part = data[start : min(start + most, sent)]
            self.put(HEAD.pack(len(part) >> 16, len(part) & 0xFFFF, frames.DATA, 0, stream.id) + part)
            self._sent_data()
        self._window -= sent
        stream.window -= sent
        return data[sent:]

    def wait(self, stream: Stream) -> None:
        """Add a stream whose data waits for a window."""
        stream.waited = 0
        self.blocked[stream] = None

    def go_on(self) -> None:
        """Send the waiting data of all streams."""
        for stream in list(self.blocked):
            if self.unread or self._window <= 0:
                return
            self.go_on_with(stream)

    def go_on_with(self, stream: Stream) -> None:
        """Send the waiting data of one stream."""
        if stream in self.blocked and stream.go_on():
            self.blocked.pop(stream, None)
            stream.unblocked()

    def open(self, size: int) -> None:
        """Increase the connection's window by `size` bytes. Raises Http2Error if it becomes too large."""
        self._window += size
        if self._window > frames.LARGEST_WINDOW:
            raise Http2Error(frames.FLOW_CONTROL_ERROR, "a window above 2^31-1")
        self.go_on()

    def change_windows(self, initial: int, streams: Iterable[Stream]) -> None:
        """Change the initial window, and open streams' windows by the difference. Raises Http2Error."""
        change, self.initial_window = initial - self.initial_window, initial
        for stream in streams:
            stream.window += change
            if stream.window > frames.LARGEST_WINDOW:
                raise Http2Error(frames.FLOW_CONTROL_ERROR, "a window above 2^31-1")
        if change > 0:
            self.go_on()


class StreamOwner(Protocol):
    """The connection that a stream belongs to."""

    def leave(self, stream: Stream, reset: bool = False) -> None:
        """Remove an ended stream."""


class StreamHandler(Protocol):
    """The receiver of a stream's events."""

    def data(self, data: bytes) -> None:
        """Receive bytes of the request's body."""

    def ended(self) -> None:
        """Called when the peer has ended its side of the stream."""

    def closed(self) -> None:
        """Called once, when the stream has ended in any way. No other call follows."""


class Stream:
    """A stream that the peer opened. Data is sent in order, within the peer's windows, until `end` or `reset`."""

    __slots__ = (
        "_announced",
        "_connection",
        "_ended",
        "_last",
        "_queue",
        "_sender",
        "begun",
        "handler",
        "id",
        "on_blocked",
        "peer_ended",
        "received",
        "waited",
        "window",
    )

    def __init__(self, connection: StreamOwner, sender: FrameSender, number: int, announced: int | None = None) -> None:
        """Create a stream. `announced`: the bytes of the body by its `content-length`; None without one."""
        self.id = number
        self._announced = announced
        self.handler: StreamHandler | None = None
        self.on_blocked: Callable[[bool], None] | None = (
            None  # called when data waits for a window, and when it is sent
        )
        self.window = sender.initial_window  # bytes that may be sent
        self.received = 0  # bytes since the peer's window was last opened
        self.peer_ended = False
        self.waited = 0  # seconds that data has waited for a window
        self._connection = connection
        self._sender = sender
        self.begun = False  # the headers of the response are sent
        self._ended = False
        self._last: bytes | None = None
        self._queue: deque[bytes] | None = None

    def count(self, size: int, ends: bool) -> bool:
        """Count received bytes of the body. Return whether they agree with its `content-length`.

        `ends`: no bytes follow.
        """
        if self._announced is None:
            return True
        self._announced -= size
        return self._announced == 0 if ends else self._announced >= 0

    @property
    def ended(self) -> bool:
        """True after `end` or `reset`: nothing more can be sent."""
        return self._ended

    def begin(self, block: bytes) -> None:
        """Send the headers of the response, unless they are sent already."""
        if not self.begun and not self._ended:
            self.begun = True
            most = frames.DEFAULT_FRAME
            ends = frames.END_HEADERS if len(block) <= most else 0
            self._sender.put(frames.frame(frames.HEADERS, ends, self.id, block[:most]))
            for start in range(most, len(block), most):
                ends = frames.END_HEADERS if start + most >= len(block) else 0
                self._sender.put(frames.frame(frames.CONTINUATION, ends, self.id, block[start : start + most]))

    def send(self, data: bytes) -> None:
        """Send bytes of the response's body."""
        if self._ended:
            return
        if self._queue:
            self._queue.append(data)
            return
        rest = self._sender.put_data(self, data)
        if rest:
            if self._queue is None:
                self._queue = deque()
            self._queue.append(rest)
            self._sender.wait(self)
            if self.on_blocked is not None:
                self.on_blocked(True)

    def end(self, trailers: bytes) -> None:
        """End the response with trailers, if there are any. If it has no headers yet, the trailers are its headers."""
        if self._ended:
            return
        self._ended = True
        if self._queue:
            self._last = trailers
        else:
            self._end(trailers)

    def go_on(self) -> bool:
        """Send waiting data within the windows. Return whether no data waits after it."""
        queue = self._queue
        while queue:
            data = queue.popleft()
            rest = self._sender.put_data(self, data)
            if rest is not data:
                self.waited = 0
            if rest:
                queue.appendleft(rest)
                return False
        if self._last is not None:
            self._end(self._last)
        return True

    def unblocked(self) -> None:
        """Report that no data waits any more. The handler may send more at once."""
        if self.on_blocked is not None and not self._ended:
            self.on_blocked(False)

    def reset(self, code: int) -> None:
        """Reset the stream: waiting data is dropped."""
        self._ended = True
        self._sender.put(frames.reset(self.id, code))
        self._connection.leave(self, reset=True)

    def close(self) -> None:
        """Call the handler's `closed`, and release the handler."""
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.closed()

    def _end(self, trailers: bytes) -> None:
        if trailers:
            self._sender.put(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, self.id, trailers))
        else:
            self._sender.put(frames.frame(frames.DATA, frames.END_STREAM, self.id, b""))
        if self.peer_ended:
            self._connection.leave(self)
        else:  # the peer need not send the rest
            self._sender.put(frames.reset(self.id, frames.NO_ERROR))
            self._connection.leave(self, reset=True)
