"""What a connection sends: frames, gathered into one write, and DATA as far as the peer's windows go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from router.picker.http2 import frames
from router.picker.http2.frames import HEAD, Http2Error


class SendingStream(Protocol):
    """A stream as its sender sees it: `window` is what may be sent, `waited` how many seconds something has waited."""

    id: int
    window: int
    waited: int

    def go_on(self) -> bool:
        """Send what waits, as far as may be. Whether nothing waits any more."""

    def reset(self, code: int) -> None:
        """End the stream at once."""


class FrameSender:
    """Sends to one peer. `unread`: it does not read. `blocked`: streams of which something waits, in their order.

    `sent_data` is called for every DATA frame.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, sent_data: Callable[[], None]
    ) -> None:
        self.unread = False
        self.blocked: dict[SendingStream, None] = {}
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
        """Send frames, with all else that is sent in this turn of the loop."""
        self._out.append(data)
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Send them now."""
        self._flushing = False
        if self._out and not self._closed:
            self._transport.write(b"".join(self._out))
        self._out.clear()

    def close(self) -> None:
        """The connection is over."""
        self._closed = True
        self.blocked.clear()
        self._out.clear()

    def put_data(self, stream: SendingStream, data: bytes) -> bytes:
        """Send bytes of a stream as far as its windows go. What is left of them."""
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

    def wait(self, stream: SendingStream) -> None:
        """Something of a stream waits for a window."""
        stream.waited = 0
        self.blocked[stream] = None

    def go_on(self) -> None:
        """Send what waits."""
        for stream in list(self.blocked):
            if self.unread or self._window <= 0:
                return
            self.go_on_with(stream)

    def go_on_with(self, stream: SendingStream) -> None:
        """The same of one stream."""
        if stream in self.blocked and stream.go_on():
            self.blocked.pop(stream, None)

    def open(self, size: int) -> None:
        """The peer lets the connection send more. Raises Http2Error."""
        self._window += size
        if self._window > frames.LARGEST_WINDOW:
            raise Http2Error(frames.FLOW_CONTROL_ERROR, "a window above 2^31-1")
        self.go_on()

    def change_windows(self, initial: int, streams: Iterable[SendingStream]) -> None:
        """The peer has another initial window, from which those of open streams are counted too. Raises Http2Error."""
        change, self.initial_window = initial - self.initial_window, initial
        for stream in streams:
            stream.window += change
            if stream.window > frames.LARGEST_WINDOW:
                raise Http2Error(frames.FLOW_CONTROL_ERROR, "a window above 2^31-1")
        if change > 0:
            self.go_on()
