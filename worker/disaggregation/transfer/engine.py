"""What every transfer engine offers: memory registered, ranges granted to a room, bytes written, grants taken back.

The receiver grants; the sender connects and writes. The rule all engines keep: **a page is reused only when no write to
it can still land.** So a grant ends with `revoke`, whose answer says whether that is known.

Deadlines are instants of `time.monotonic()`. Addresses are bytes in the owner's address space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from worker.disaggregation.transfer.runs import Ranges, Writes


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of host memory: `length` bytes at the address `pointer`. Its owner keeps it mapped while registered."""

    pointer: int
    length: int

    @classmethod
    def of(cls, array: NDArray[Any]) -> Region:
        """Where a contiguous array lies."""
        if not array.flags.c_contiguous:
            raise ValueError("only a contiguous array is one region")
        return cls(array.ctypes.data, array.nbytes)


class GrantKey(NamedTuple):
    """Who may write: a room, and which attempt of it. Both in [0, 2^63)."""

    room: int
    generation: int


class Quiescence(Enum):
    """What is known after a grant was revoked."""

    QUIESCENT = "quiescent"
    """No write under the grant can still land: its pages may be reused."""
    UNKNOWN = "unknown"
    """A write may still land: the pages stay quarantined; ask `revoke` again later."""


class TransferError(Exception):
    """A transfer that failed. Of its bytes none, some or all may have landed."""


class DeadlineError(TransferError):
    """The peer did not answer in time. The session can't be used again."""


class PeerLostError(TransferError):
    """The peer can't be reached, closed the connection, or broke the protocol. The session can't be used again."""


class RefusedError(TransferError):
    """The peer said no: another secret; no such grant, or a range outside of it. The session serves other rooms."""


class Session(Protocol):
    """A sender's way to one peer. Threads may share it; their writes take turns."""

    def write(self, key: GrantKey, writes: Writes, deadline: float) -> None:
        """Copy registered memory of ours into ranges the peer granted to `key`; returns when all bytes landed.

        Raises TransferError. Raises ValueError for a source outside of the registered regions.
        """
        ...

    def close(self) -> None:
        """Give the connection up, from any thread: a waiting write raises PeerLostError. May be repeated."""
        ...


class TransferEngine(Protocol):
    """One per process (rank): sender, receiver or both. Its methods may be called from any thread."""

    name: str
    """tcp, shm, mooncake, nixl."""

    def allocate(self, length: int) -> NDArray[np.uint8]:
        """New zeroed bytes, page-aligned, that live as long as the array; `Region.of` tells where they are.

        Shared memory needs it for what is written from; any host memory will do for everything else.
        """
        ...

    def register(self, regions: Sequence[Region]) -> None:
        """Let these regions be source and destination. All of them, before `address` and `connect`.

        Raises ValueError for a region that is empty or overlaps a registered one.
        """
        ...

    def address(self) -> bytes:
        """What a peer hands to its `connect`; opaque, at most 64 KiB."""
        ...

    def connect(self, peer: bytes, deadline: float) -> Session:
        """A session to the engine with that address. Raises TransferError."""
        ...

    def grant(self, key: GrantKey, ranges: Ranges) -> None:
        """Let peers write these ranges, and no other, under `key`, until it is revoked.

        Raises ValueError when a range is not registered, or when `key` has a grant or one not yet quiescent.
        """
        ...

    def revoke(self, key: GrantKey, deadline: float) -> Quiescence:
        """Take a grant back: from now on every new write under it is refused. A key without a grant is quiescent.

        Waits until `deadline` for writes under way. After UNKNOWN ask again: the answer changes when the writer
        acknowledges.
        """
        ...

    def close(self) -> None:
        """End sessions, threads and sockets. May be repeated."""
        ...
