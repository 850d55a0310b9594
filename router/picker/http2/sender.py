"""Sending of a connection: frames are collected for one write, and DATA is sent within the peer's windows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from router.picker.http2 import frames
from router.picker.http2.frames import HEAD, Http2Error


class SendingStream(Protocol):
    """A stream as its sender uses it.

    - `window`: bytes that may be sent.
    - `waited`: seconds that data has waited for a window.
    """

    id: int
    window: int
    waited: int

    def go_on(self) -> bool:
        """Send waiting data within the windows. Return whether no data waits after it."""

    def reset(self, code: int) -> None:
        """Reset the stream."""


class FrameSender:
    """The sender of one connection.

    - `unread`: the peer does not read, so the transport's buffer is full.
    - `blocked`: streams with waiting data, in their order.
    - `sent_data`: called for each sent DATA frame.
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

    def put_data(self, stream: SendingStream, data: bytes) -> bytes:
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

    def wait(self, stream: SendingStream) -> None:
        """Add a stream whose data waits for a window."""
        stream.waited = 0
        self.blocked[stream] = None

    def go_on(self) -> None:
        """Send the waiting data of all streams."""
        for stream in list(self.blocked):
            if self.unread or self._window <= 0:
                return
            self.go_on_with(stream)

    def go_on_with(self, stream: SendingStream) -> None:
        """Send the waiting data of one stream."""
        if stream in self.blocked and stream.go_on():
            self.blocked.pop(stream, None)

    def open(self, size: int) -> None:
        """Increase the connection's window by `size` bytes. Raises Http2Error if it becomes too large."""
        self._window += size
        if self._window > frames.LARGEST_WINDOW:
            raise Http2Error(frames.FLOW_CONTROL_ERROR, "a window above 2^31-1")
        self.go_on()

    def change_windows(self, initial: int, streams: Iterable[SendingStream]) -> None:
        """Change the initial window, and open streams' windows by the difference. Raises Http2Error."""
        change, self.initial_window = initial - self.initial_window, initial
        for stream in streams:
            stream.window += change
            if stream.window > frames.LARGEST_WINDOW:
                raise Http2Error(frames.FLOW_CONTROL_ERROR, "a window above 2^31-1")
        if change > 0:
            self.go_on()
