"""One stream of a connection: who handles it, and what of it waits for a window."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from router.picker.http2 import frames
from router.picker.http2.sender import FrameSender


class StreamOwner(Protocol):
    """The connection that a stream belongs to."""

    def leave(self, stream: Stream, reset: bool = False) -> None:
        """The stream is over."""


class StreamHandler(Protocol):
    """Handles what comes in a stream."""

    def data(self, data: bytes) -> None:
        """Bytes of the request's body; they may be none."""

    def ended(self) -> None:
        """The peer sends no more."""

    def closed(self) -> None:
        """The stream is over, however it ended. Called once, and nothing after it."""


class Stream:
    """What is sent goes out in its order, as the peer's windows allow. After `end` or `reset` nothing is sent."""

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
        self.waited = 0  # seconds that something has been waiting for a window
        self._connection = connection
        self._sender = sender
        self.begun = False  # the headers of the answer are sent
        self._ended = False
        self._last: bytes | None = None
        self._queue: deque[bytes] | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more can be sent."""
        return self._ended

    def begin(self, block: bytes) -> None:
        """Send the headers of the answer, unless they are sent."""
        if not self.begun and not self._ended:
            self.begun = True
            self._sender.put(frames.frame(frames.HEADERS, frames.END_HEADERS, self.id, block))

    def send(self, data: bytes) -> None:
        """Send bytes of the answer's body."""
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
        """End the answer: with these trailers, which are its headers where it has not begun."""
        if self._ended:
            return
        self._ended = True
        if self._queue:
            self._last = trailers
        else:
            self._end(trailers)

    def go_on(self) -> bool:
        """Send what waits, as far as may be. Whether nothing waits any more."""
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
        """End the stream at once."""
        self._ended = True
        self._sender.put(frames.reset(self.id, code))
        self._connection.leave(self, reset=True)

    def close(self) -> None:
        """It is over: its handler hears of it, and they let go of each other."""
        handler, self.handler = self.handler, None
        if handler is not None:
            handler.closed()

    def _end(self, trailers: bytes) -> None:
        self._sender.put(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, self.id, trailers))
        if self.peer_ended:
            self._connection.leave(self)
        else:  # what the peer would still send is not wanted
            self._sender.put(frames.reset(self.id, frames.NO_ERROR))
            self._connection.leave(self, reset=True)
