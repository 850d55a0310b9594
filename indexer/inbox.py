"""Live messages between being received and being applied, and how that goes in Python.

Nearly always what comes is what is next, and of no interest as long as it can be applied: `indexer/native_inbox.py`
keeps it from Python altogether.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from selectors import EVENT_READ, DefaultSelector
from typing import NamedTuple

import zmq

from indexer.holdings import Target
from indexer.index import Applied, Index, tell
from indexer.receiving import receive_run
from kvevents.frames import MalformedFrameError, StreamFrame, parse_live

# Of live batches before whatever else there is to do has its turn.
_BYTES_A_ROUND = 256 << 10
# Of live batches, once rounds follow each other: a fleet's streams are not in step, and each batch that is read alone
# wakes the reader, which takes Python's lock from whoever has it.
_ROUND_SECONDS = 0.001


class Received(NamedTuple):
    """A turn's messages of one socket, by its file descriptor: maybe none.

    `size`: bytes of all `messages`; `largest`: of one. `first`: the sequence number of the first, if there are any, and
    all are batches that follow one another; then `payload` is the last one's.
    """

    socket: int
    messages: int
    size: int
    largest: int
    first: int | None
    payload: bytes


class Taken(NamedTuple):
    """Batches of one socket, from `first` to `last`, that were received, were expected, and are applied.

    `payload`: of the last one, which was received at `received_at` (unix seconds). `size`: bytes of all of them.
    """

    socket: int
    first: int
    last: int
    payload: bytes
    size: int
    received_at: float


class Reading(NamedTuple):
    """What was read. `told`: batches of `taken` that there is something to tell of, by socket and sequence number, as
    `Inbox.apply` tells. `received`: what came last and was not expected, or not alone: nothing of it is applied.
    `untold`: batches were applied that are not among `taken` yet, as it may be for half a second where much comes."""

    taken: list[Taken]
    told: list[tuple[tuple[int, int], Applied | Exception]]
    received: list[Received]
    untold: bool = False


class Inbox(ABC):
    """What receives for an index. For the one thread that has the sockets. They are known by their file descriptors."""

    @abstractmethod
    def follow(self, socket: zmq.Socket[bytes], target: Target) -> int:
        """Receive of a live socket what is for a target. Its file descriptor."""

    @abstractmethod
    def leave(self, socket: int) -> None:
        """Receive no more of a socket, which is still open."""

    @abstractmethod
    def look_again(self, socket: int) -> None:
        """Something else may have taken a socket's word that it has something."""

    @abstractmethod
    def expect(self, socket: int, seq: int | None, largest: int) -> None:
        """Batches of a socket from this number on may be applied without being asked for, as long as none has more
        than `largest` bytes. None: whatever comes is of interest."""

    @abstractmethod
    def read(self, seconds: float) -> Reading:
        """Wait so long, at most, for something to come, live or else, and receive what has come live: of one socket
        after another, each for a turn, until it is enough for a round. Further rounds follow where all is expected."""

    @abstractmethod
    def rest(self) -> list[Taken]:
        """Batches that were applied, and that no reading has told of."""

    @abstractmethod
    def messages(self, place: int) -> list[list[bytes]]:
        """The frames of what was received, by its place there."""

    @abstractmethod
    def apply(self, places: Sequence[int]) -> list[tuple[tuple[int, int], Applied | Exception]]:
        """Apply batches that follow one another, of what was received at these places.

        Those that there is something to tell of, each by place and sequence number: what became of it, or why it could
        not be applied.
        """


class PythonInbox(Inbox):
    """See `Inbox`. It leaves all that comes to who asked. `others`: a file descriptor of whatever else may come."""

    def __init__(self, index: Index, others: int) -> None:
        self._index = index
        self._followed: dict[int, tuple[zmq.Socket[bytes], Target]] = {}
        # ZeroMQ's own poll looks at every socket each time. What is watched here instead tells once that something
        # came; so a socket is `ready` until nothing is left.
        self._selector = DefaultSelector()
        self._selector.register(others, EVENT_READ)
        self._ready: dict[int, None] = {}
        self._came: list[tuple[Target, list[list[bytes]], list[StreamFrame]]] = []
        self._began = 0.0
        self._busy = False

    def follow(self, socket: zmq.Socket[bytes], target: Target) -> int:
        fd = int(socket.fd)
        self._followed[fd] = socket, target
        self._selector.register(fd, EVENT_READ)
        self.look_again(fd)  # it may have told before
        return fd

    def leave(self, socket: int) -> None:
        self._selector.unregister(socket)
        self._ready.pop(socket, None)
        del self._followed[socket]

    def look_again(self, socket: int) -> None:
        self._ready[socket] = None

    def expect(self, socket: int, seq: int | None, largest: int) -> None:
        pass  # it is no less work here

    def read(self, seconds: float) -> Reading:
        if self._busy and not self._ready:
            time.sleep(min(max(self._began + _ROUND_SECONDS - time.monotonic(), 0), seconds))
        for key, _ in self._selector.select(0 if self._ready else seconds):
            if key.fd in self._followed:
                self.look_again(key.fd)
        began = time.monotonic()
        received = self._receive()
        if any(turn.messages for turn in received):
            self._busy = began - self._began < 2 * _ROUND_SECONDS
            self._began = began
        return Reading([], [], received)

    def rest(self) -> list[Taken]:
        return []

    def _receive(self) -> list[Received]:
        self._came = []
        received: list[Received] = []
        size = 0
        for fd in list(self._ready):
            if size >= _BYTES_A_ROUND:
                break
            socket, target = self._followed[fd]
            messages, drained = receive_run(socket)
            del self._ready[fd]
            if not drained:
                self.look_again(fd)  # behind the others
            run = _run(messages)
            self._came.append((target, messages, run))
            sizes = [sum(map(len, parts)) for parts in messages]
            first, payload = (run[0].seq, run[-1].payload) if run else (None, b"")
            received.append(Received(fd, len(messages), sum(sizes), max(sizes, default=0), first, payload))
            size += sum(sizes)
        return received

    def messages(self, place: int) -> list[list[bytes]]:
        return self._came[place][1]

    def apply(self, places: Sequence[int]) -> list[tuple[tuple[int, int], Applied | Exception]]:
        told: list[tuple[tuple[int, int], Applied | Exception]] = []
        for place in places:
            target, _, run = self._came[place]
            for frame in run:
                tell(told, (place, frame.seq), partial(self._index.apply_payload, target, frame.payload))
        return told


def _run(messages: list[list[bytes]]) -> list[StreamFrame]:
    """Messages that are batches which follow one another; none of any others."""
    try:
        run = [parse_live(parts) for parts in messages]
    except MalformedFrameError:
        return []
    follow = all(after.seq == before.seq + 1 for before, after in pairwise(run))
    return run if follow else []
