"""The inbox in C++: it receives, keeps and applies live messages without Python's lock.

It calls libzmq directly, with the library and the sockets that pyzmq has.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import zmq
import zmq.backend

from indexer._native import LiveReader
from indexer.inbox import AppliedBatches, Inbox, Reading, Received
from indexer.index import Applied
from indexer.native.index import NativeIndex
from indexer.targets import Target

_FUNCTIONS = [f"zmq_msg_{name}" for name in ("init", "recv", "data", "size", "more", "copy", "close")]
_NOTHING, _TO_REPORT = 0, 1  # results of LiveReader.read


class NativeInbox(Inbox):
    """Inbox for a native index. A wait also ends with an event of the file descriptor `others`."""

    def __init__(self, index: NativeIndex, functions: list[int], others: int) -> None:
        self._index = index
        self._reader = LiveReader(functions, index.core, others)
        self._targets: dict[int, Target] = {}
        self._round: list[Target] = []  # the target at each place of `received`

    def follow(self, socket: zmq.Socket[bytes], target: Target) -> int:
        fd = int(socket.fd)
        self._targets[fd] = target
        self._reader.follow(fd, socket.underlying)
        return fd

    def leave(self, socket: int) -> None:
        self._reader.leave(socket)
        del self._targets[socket]

    def look_again(self, socket: int) -> None:
        self._reader.look_again(socket)

    def expect(self, socket: int, seq: int | None, largest: int) -> None:
        if seq is None or seq >= 2**64:
            self._reader.expect_nothing(socket)
        else:
            self._reader.expect(socket, self._index.number(self._targets[socket]), seq, largest)

    def read(self, seconds: float) -> Reading:
        left = self._reader.read(seconds)
        batches = self._batches()
        if left == _NOTHING:
            return Reading(batches, [], [], self._reader.has_unreported())
        received = [*map(Received._make, self._reader.received())]
        self._round = [self._targets[turn.socket] for turn in received]
        if left != _TO_REPORT:
            return Reading(batches, [], received)
        reports = self._index.apply_addressed(self._reader, self._round)
        return Reading(batches, [((received[place].socket, seq), applied) for (place, seq), applied in reports], [])

    def rest(self) -> list[AppliedBatches]:
        self._reader.rest()
        return self._batches()

    def _batches(self) -> list[AppliedBatches]:
        return [*map(AppliedBatches._make, self._reader.applied())]

    def messages(self, place: int) -> list[list[bytes]]:
        return self._reader.messages(place)

    def apply(self, places: Sequence[int]) -> list[tuple[tuple[int, int], Applied | Exception]]:
        return self._index.apply_received(self._reader, self._round, places)


def zmq_functions() -> list[int] | None:
    """Return the addresses of the libzmq functions that the inbox calls, from pyzmq's own module; None if not found."""
    try:
        library = ctypes.CDLL(str(sys.modules[zmq.backend.Socket.__module__].__file__))
        return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS]
    except (OSError, AttributeError, KeyError):
        return None
