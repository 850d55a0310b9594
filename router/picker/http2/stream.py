"""One stream of a connection, with its handler and the data that waits for a window."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from router.picker.http2 import frames
from router.picker.http2.sender import FrameSender


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
        "_connection",
        "_ended",
        "_last",
        "_queue",
        "_sender",
        "begun",
        "handler",
        "id",
        "peer_ended",
        "received",
        "waited",
        "window",
    )

    def __init__(self, connection: StreamOwner, sender: FrameSender, number: int) -> None:
        self.id = number
        self.handler: StreamHandler | None = None
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

    @property
    def ended(self) -> bool:
        """True after `end` or `reset`: nothing more can be sent."""
        return self._ended

    def begin(self, block: bytes) -> None:
        """Send the headers of the response, unless they are sent already."""
        if not self.begun and not self._ended:
            self.begun = True
            self._sender.put(frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, block))

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

    def end(self, trailers: bytes) -> None:
        """End the response with trailers. If it has no headers yet, the trailers are its headers."""
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
        self._sender.put(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, self.id, trailers))
        if self.peer_ended:
            self._connection.leave(self)
        else:  # the peer need not send the rest
            self._sender.put(frames.reset(self.id, frames.NO_ERROR))
            self._connection.leave(self, reset=True)
