"""The grants of a receiver: ranges that peers may write, and writes that are landing."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from worker.kv_transfer.transfer.engine import GrantKey, Quiescence, RefusedError
from worker.kv_transfer.transfer.memory import Memory, Spans
from worker.kv_transfer.transfer.runs import Addresses, Ranges


class Grant:
    """Ranges that one key may write. Bytes land inside of `with grant`; after `revoke`, entering it fails."""

    def __init__(self, key: GrantKey, ranges: Ranges) -> None:
        self.key = key
        self._spans = Spans(ranges)
        self._changed = threading.Condition()
        self._landing = 0
        self._revoked = False

    def check(self, pointers: Addresses, lengths: Addresses) -> None:
        """Check ranges. Raises RefusedError for one that is not granted."""
        try:
            self._spans.find(pointers, lengths)
        except ValueError as error:
            raise RefusedError(f"{_named(self.key)} may not write there: {error} of the granted ranges") from None

    def enter(self) -> None:
        """Begin a write. Raises RefusedError if the grant was revoked."""
        with self._changed:
            if self._revoked:
                raise RefusedError(f"the grant of {_named(self.key)} was revoked")
            self._landing += 1

    def leave(self) -> None:
        """End a write that landed or was aborted."""
        with self._changed:
            self._landing -= 1
            if self._revoked:
                self._changed.notify_all()

    __enter__ = enter

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def revoke(self, deadline: float) -> Quiescence:
        """Refuse new writes, and wait for current ones."""
        with self._changed:
            self._revoked = True
            landed = self._changed.wait_for(lambda: not self._landing, max(0, deadline - time.monotonic()))
        return Quiescence.QUIESCENT if landed else Quiescence.UNKNOWN


class Grants:
    """All grants of a receiver: valid ones, and revoked ones whose writes may still land."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._granted: dict[GrantKey, Grant] = {}

    def add(self, key: GrantKey, ranges: Ranges) -> None:
        """Add a grant. Raises ValueError for ranges that are not registered and for a key in use."""
        check_key(key)
        self._memory.check(ranges)
        grant = Grant(key, ranges)
        with self._lock:
            if key in self._granted:
                raise ValueError(f"{_named(key)} already has a grant: revoke it, or use the next generation")
            self._granted[key] = grant

    def find(self, key: GrantKey, pointers: Addresses, lengths: Addresses) -> Grant:
        """Return the grant that covers these ranges. Raises RefusedError."""
        with self._lock:
            grant = self._granted.get(key)
        if grant is None:
            raise RefusedError(f"{_named(key)} has no grant")
        grant.check(pointers, lengths)
        try:
            self._memory.check(Ranges(pointers, lengths))
        except ValueError as error:  # granted neighbours, but in two regions
            raise RefusedError(f"{_named(key)} may not write there: {error} of one region") from None
        return grant

    def revoke(self, key: GrantKey, deadline: float) -> Quiescence:
        """Revoke as TransferEngine.revoke does."""
        with self._lock:
            grant = self._granted.get(key)
        if grant is None:
            return Quiescence.QUIESCENT
        quiescence = grant.revoke(deadline)
        if quiescence is Quiescence.QUIESCENT:
            with self._lock:
                if self._granted.get(key) is grant:
                    del self._granted[key]
        return quiescence


def check_key(key: GrantKey) -> None:
    """Check the numbers of a key. Raises ValueError."""
    if not (0 <= key.room < 1 << 63 and 0 <= key.generation < 1 << 63):
        raise ValueError(f"{key}: room and generation must be from 0 to 2^63 - 1")


def _named(key: GrantKey) -> str:
    return f"room {key.room}, generation {key.generation},"
