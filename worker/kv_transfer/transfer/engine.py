"""The interface of every transfer engine: register memory, grant ranges to a room, write bytes, revoke grants.

The receiver grants; the sender connects and writes. All engines keep one rule: **a page is reused only when no write to
it can still land.** Therefore a grant ends with `revoke`, which reports whether that is known.

Deadlines are instants of `time.monotonic()`. Addresses are bytes in the owner's address space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from worker.kv_transfer.transfer.runs import Ranges, Writes


@dataclass(frozen=True, slots=True)
class Region:
    """A region of host memory: `length` bytes at address `pointer`, mapped while it is registered."""

    pointer: int
    length: int

    @classmethod
    def of(cls, array: NDArray[Any]) -> Region:
        """Return the region of a contiguous array."""
        if not array.flags.c_contiguous:
            raise ValueError("the array must be contiguous to be one region")
        return cls(array.ctypes.data, array.nbytes)


class GrantKey(NamedTuple):
    """The key of a grant: a room and its attempt, both in [0, 2^63)."""

    room: int
    generation: int


class Quiescence(Enum):
    """The result of a revocation."""

    QUIESCENT = "quiescent"
    """No write under the grant can still land: its pages may be reused."""
    UNKNOWN = "unknown"
    """A write may still land: the pages stay in quarantine; call `revoke` again later."""


class TransferError(Exception):
    """A failed transfer. None, some or all of its bytes may have landed."""


class DeadlineError(TransferError):
    """A peer that did not answer in time. The session cannot be used again."""


class PeerLostError(TransferError):
    """A peer that is unreachable, closed the connection, or violated the protocol. The session cannot be used again."""


class RefusedError(TransferError):
    """A refusal by the peer: wrong secret, missing grant, or a range outside of it. The session can still be used."""


class Session(Protocol):
    """A sender's session with one peer. Threads may share it; their writes run one after another."""

    def write(self, key: GrantKey, writes: Writes, deadline: float) -> None:
        """Copy our registered memory into ranges that the peer granted to `key`. Return when all bytes have landed.

        Raises TransferError, and ValueError for a source outside of the registered regions.
        """
        ...

    def close(self) -> None:
        """End the connection, from any thread. A waiting write raises PeerLostError. Repeated calls have no effect."""
        ...


class TransferEngine(Protocol):
    """An engine of one process (rank): sender, receiver or both. Its methods may be called from any thread."""

    name: str
    """The name: tcp, shm, mooncake or nixl."""

    def allocate(self, length: int) -> NDArray[np.uint8]:
        """Return new zeroed bytes, page-aligned. Shared memory (shm) needs them as the source of writes."""
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Register all sources and destinations, before `address` and `connect`. Raises ValueError for bad regions."""
        ...

    def address(self) -> bytes:
        """Return the bytes that a peer passes to its `connect`: opaque, at most 64 KiB."""
        ...

    def connect(self, peer: bytes, deadline: float) -> Session:
        """Return a session to the engine at an address. Raises TransferError."""
        ...

    def grant(self, key: GrantKey, ranges: Ranges) -> None:
        """Allow peers to write exactly these ranges under `key`, until it is revoked.

        Raises ValueError if a range is not registered, or if `key` has a grant or one that is not yet quiescent.
        """
        ...

    def revoke(self, key: GrantKey, deadline: float) -> Quiescence:
        """Revoke a grant: every new write under it is refused. A key without a grant is quiescent.

        Waits until `deadline` for current writes. After UNKNOWN, call again: the answer changes when the writer
        acknowledges.
        """
        ...

    def close(self) -> None:
        """End sessions, threads and sockets. Repeated calls have no effect."""
        ...
