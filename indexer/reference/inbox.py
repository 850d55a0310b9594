"""The inbox in Python: it receives live messages and returns all of them to the caller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from selectors import EVENT_READ, DefaultSelector

import zmq

from indexer.inbox import AppliedBatches, Inbox, Reading, Received
from indexer.index import Applied, Index, apply_and_report
from indexer.sockets import receive_run
from indexer.targets import Target
from kvevents.frames import MalformedFrameError, StreamFrame, parse_live

# Maximum bytes of live batches in a round, before the reader does its other work.
_BYTES_A_ROUND = 256 << 10
# Minimum time between rounds under load. The streams of a fleet are not in step. Without a pause, each batch would wake
# the reader alone, and the reader would take Python's lock from another thread each time.
_ROUND_SECONDS = 0.001


class PythonInbox(Inbox):
    """Inbox for any index. `others` is a file descriptor of the other events that end a wait."""

    def __init__(self, index: Index, others: int) -> None:
        self._index = index
        self._followed: dict[int, tuple[zmq.Socket[bytes], Target]] = {}
        # ZeroMQ's own poll checks every socket each time. A file descriptor reports a message only once instead, so a
        # socket stays in `_ready` until it is drained.
        self._selector = DefaultSelector()
        self._selector.register(others, EVENT_READ)
        self._ready: dict[int, None] = {}
        self._received: list[tuple[Target, list[list[bytes]], list[StreamFrame]]] = []
        self._round_at = 0.0
        self._busy = False

    def follow(self, socket: zmq.Socket[bytes], target: Target) -> int:
        fd = int(socket.fd)
        self._followed[fd] = socket, target
        self._selector.register(fd, EVENT_READ)
        self.look_again(fd)  # its first notification may have come already
        return fd

    def leave(self, socket: int) -> None:
        self._selector.unregister(socket)
        self._ready.pop(socket, None)
        del self._followed[socket]

    def look_again(self, socket: int) -> None:
        self._ready[socket] = None

    def expect(self, socket: int, seq: int | None, largest: int) -> None:
        pass  # in Python, expected batches are no cheaper than others

    def read(self, seconds: float) -> Reading:
        if self._busy and not self._ready:
            time.sleep(min(max(self._round_at + _ROUND_SECONDS - time.monotonic(), 0), seconds))
        for key, _ in self._selector.select(0 if self._ready else seconds):
            if key.fd in self._followed:
                self.look_again(key.fd)
        now = time.monotonic()
        received = self._receive()
        if any(turn.messages for turn in received):
            self._busy = now - self._round_at < 2 * _ROUND_SECONDS
            self._round_at = now
        return Reading([], [], received)

    def rest(self) -> list[AppliedBatches]:
        return []

    def _receive(self) -> list[Received]:
        self._received = []
        received: list[Received] = []
        size = 0
        for fd in list(self._ready):
            if size >= _BYTES_A_ROUND:
                break
            socket, target = self._followed[fd]
            messages, drained = receive_run(socket)
            del self._ready[fd]
            if not drained:
                self.look_again(fd)  # behind the other sockets
            run = _consecutive(messages)
            self._received.append((target, messages, run))
            sizes = [sum(map(len, parts)) for parts in messages]
            first, payload = (run[0].seq, run[-1].payload) if run else (None, b"")
            received.append(Received(fd, len(messages), sum(sizes), max(sizes, default=0), first, payload))
            size += sum(sizes)
        return received

    def messages(self, place: int) -> list[list[bytes]]:
        return self._received[place][1]

    def apply(self, places: Sequence[int]) -> list[tuple[tuple[int, int], Applied | Exception]]:
        reports: list[tuple[tuple[int, int], Applied | Exception]] = []
        for place in places:
            target, _, run = self._received[place]
            for frame in run:
                apply = partial(self._index.apply_payload, target, frame.payload)
                apply_and_report(reports, (place, frame.seq), apply)
        return reports


def _consecutive(messages: list[list[bytes]]) -> list[StreamFrame]:
    """Return the batches in some messages if their sequence numbers are consecutive, else an empty list."""
    try:
        run = [parse_live(parts) for parts in messages]
    except MalformedFrameError:
        return []
    consecutive = all(after.seq == before.seq + 1 for before, after in pairwise(run))
    return run if consecutive else []
