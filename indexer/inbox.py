"""Live messages between being received and being applied, and how that goes in Python.

Nearly always what comes is what is next, and of no interest as long as it can be applied: `indexer/native_inbox.py`
keeps it from Python altogether.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import zmq

from indexer.holdings import Target
from indexer.index import Applied, Index, tell
from indexer.receiving import receive_run
from kvevents.frames import MalformedFrameError, StreamFrame, parse_live

# Of live batches before whatever else there is to do has its turn.
_BYTES_A_ROUND = 256 << 10


class Received(NamedTuple):
    """A turn's messages of one socket.

    `drained`: nothing is left. `size`: bytes of all `messages`; `largest`: of one. `first`: the sequence number of
    the first, if there are any, and all are batches that follow one another; then `payload` is the last one's.
    """

    drained: bool
    messages: int
    size: int
    largest: int
    first: int | None
    payload: bytes


class Inbox(ABC):
    """What receives for an index. For the one thread that has the sockets."""

    @abstractmethod
    def receive(self, sockets: Sequence[zmq.Socket[bytes]]) -> list[Received]:
        """Receive what has come on live sockets, in place of what came before: of one after another, each for a turn,
        until it is enough for a round. Of those that had their turn."""

    @abstractmethod
    def messages(self, place: int) -> list[list[bytes]]:
        """The frames of the messages that one socket had, the socket at its place."""

    @abstractmethod
    def apply(self, runs: Sequence[tuple[int, Target]]) -> list[tuple[tuple[int, int], Applied | Exception]]:
        """Apply batches that follow one another, of sockets at their places, to targets.

        Those that there is something to tell of, each by the number of its run and its own sequence number: what became
        of it, or why it could not be applied.
        """


class PythonInbox(Inbox):
    """See `Inbox`."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._came: list[tuple[list[list[bytes]], list[StreamFrame]]] = []

    def receive(self, sockets: Sequence[zmq.Socket[bytes]]) -> list[Received]:
        self._came = []
        received: list[Received] = []
        size = 0
        for socket in sockets:
            if size >= _BYTES_A_ROUND:
                break
            messages, drained = receive_run(socket)
            run = _run(messages)
            self._came.append((messages, run))
            sizes = [sum(map(len, parts)) for parts in messages]
            first, payload = (run[0].seq, run[-1].payload) if run else (None, b"")
            received.append(Received(drained, len(messages), sum(sizes), max(sizes, default=0), first, payload))
            size += sum(sizes)
        return received

    def messages(self, place: int) -> list[list[bytes]]:
        return self._came[place][0]

    def apply(self, runs: Sequence[tuple[int, Target]]) -> list[tuple[tuple[int, int], Applied | Exception]]:
        told: list[tuple[tuple[int, int], Applied | Exception]] = []
        for run, (place, target) in enumerate(runs):
            for frame in self._came[place][1]:
                tell(told, (run, frame.seq), partial(self._index.apply_payload, target, frame.payload))
        return told


def _run(messages: list[list[bytes]]) -> list[StreamFrame]:
    """Messages that are batches which follow one another; none of any others."""
    try:
        run = [parse_live(parts) for parts in messages]
    except MalformedFrameError:
        return []
    follow = all(after.seq == before.seq + 1 for before, after in pairwise(run))
    return run if follow else []
