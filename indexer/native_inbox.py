"""Live messages that Python never sees: received, kept and applied by the native core, without Python's lock.

It calls libzmq itself, by the same library and the same sockets that pyzmq has.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence

import zmq
import zmq.backend

from indexer._native import Inbox as NativeCore
from indexer.holdings import Target
from indexer.inbox import Inbox, Received
from indexer.index import Applied
from indexer.native_index import NativeIndex

_FUNCTIONS = ("zmq_msg_init", "zmq_msg_recv", "zmq_msg_data", "zmq_msg_size", "zmq_msg_more", "zmq_msg_close")


class NativeInbox(Inbox):
    """See `Inbox`. `functions`: of `zmq_functions`."""

    def __init__(self, index: NativeIndex, functions: list[int]) -> None:
        self._index = index
        self._core = NativeCore(functions)

    def receive(self, sockets: Sequence[zmq.Socket[bytes]]) -> list[Received]:
        self._core.receive([socket.underlying for socket in sockets])
        return [*map(Received._make, self._core.received())]

    def messages(self, place: int) -> list[list[bytes]]:
        return self._core.messages(place)

    def apply(self, runs: Sequence[tuple[int, Target]]) -> list[tuple[tuple[int, int], Applied | Exception]]:
        return self._index.apply_received(self._core, runs)


def zmq_functions() -> list[int] | None:
    """Where the functions are that an inbox needs; None where they cannot be found: in the library that pyzmq loaded,
    among what its own module depends on."""
    try:
        library = ctypes.CDLL(str(sys.modules[zmq.backend.Socket.__module__].__file__))
        return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS]
    except (OSError, AttributeError, KeyError):
        return None
