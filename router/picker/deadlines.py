"""Deadlines that are all equally far away: one timer for all of them, because nearly all are met."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable


class Deadlines:
    """Calls what a key was set with when it was not dropped within `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._due: dict[Hashable, tuple[float, Callable[[], None]]] = {}  # the first is the next
        self._timer: asyncio.TimerHandle | None = None

    def set(self, key: Hashable, late: Callable[[], None]) -> None:
        """From now on."""
        loop = asyncio.get_running_loop()
        self._due[key] = (loop.time() + self._seconds, late)
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._ring)

    def drop(self, key: Hashable) -> None:
        """It is met, or not waited for any more."""
        self._due.pop(key, None)

    def close(self) -> None:
        """Nothing is waited for any more."""
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for key, (at, late) in list(self._due.items()):
            if at > now:
                self._timer = loop.call_later(at - now, self._ring)
                return
            del self._due[key]
            late()
