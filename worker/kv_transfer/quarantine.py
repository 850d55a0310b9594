"""Pages of failed rooms until no write to them can still land. **Only then may a page be reused.**

The transfer engine alone can confirm this: a grant is revoked repeatedly until the engine answers QUIESCENT. A report
or the end of the sender is no proof, because bytes may still be in transit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from worker.kv_transfer.rooms import Room
from worker.kv_transfer.transfer import GrantKey, Quiescence, TransferEngine

logger = logging.getLogger(__name__)

WAIT_S = 0.25  # seconds for one room before the next one's turn
FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 1.0
CLOSE_S = 2.0


@dataclass(slots=True)
class _Entry:
    room: Room
    key: GrantKey
    pages: int
    pause: float = FIRST_PAUSE_S
    due: float = 0.0


class Quarantine:
    """A thread that revokes grants of failed rooms, and marks the rooms quiet."""

    def __init__(self, engine: TransferEngine) -> None:
        self._engine = engine
        self._entries: dict[GrantKey, _Entry] = {}
        self._fresh: deque[_Entry] = deque()
        self._changed = threading.Condition()
        self._close_at: float | None = None
        self._thread = threading.Thread(target=self._run, name="kv-quarantine", daemon=True)
        self._thread.start()

    @property
    def rooms(self) -> int:
        with self._changed:
            return len(self._entries)

    @property
    def pages(self) -> int:
        with self._changed:
            return sum(entry.pages for entry in self._entries.values())

    def add(self, room: Room, key: GrantKey, pages: int) -> None:
        with self._changed:
            entry = self._entries[key] = _Entry(room, key, pages)
            self._fresh.append(entry)
            self._changed.notify()

    def close(self) -> None:
        """Retry until all pages are free, for at most CLOSE_S seconds, and end the thread."""
        with self._changed:
            self._close_at = time.monotonic() + CLOSE_S
            self._changed.notify()
        self._thread.join()
        if self._entries:
            logger.warning("closed with %d rooms whose pages may still be written to", len(self._entries))

    def _run(self) -> None:
        while (entry := self._next()) is not None:
            wait = WAIT_S if entry.due else 0.0  # the first attempt only stops new writes
            try:
                answer = self._engine.revoke(entry.key, time.monotonic() + wait)
            except Exception:
                logger.exception("revoking the grant of room %d failed", entry.room.number)
                answer = Quiescence.UNKNOWN
            with self._changed:
                if answer is Quiescence.QUIESCENT:
                    del self._entries[entry.key]
                    entry.room.set_quiet()
                else:
                    entry.due = time.monotonic() + entry.pause
                    entry.pause = min(2 * entry.pause, MAX_PAUSE_S)

    def _next(self) -> _Entry | None:
        """Return the next room to revoke, new ones first; `None` at the end of `close`."""
        with self._changed:
            while True:
                now = time.monotonic()
                if self._fresh:
                    return self._fresh.popleft()
                if self._close_at is not None and (not self._entries or now >= self._close_at):
                    return None
                entry = min(self._entries.values(), key=lambda entry: entry.due, default=None)
                if entry is not None and entry.due <= now:
                    return entry
                waits = [entry.due - now] if entry else []
                if self._close_at is not None:
                    waits.append(self._close_at - now)
                self._changed.wait(min(waits, default=None))
