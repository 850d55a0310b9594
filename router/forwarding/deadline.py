"""A deadline that is moved with every sign of life, without a timer made for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

# How often a deadline that was moved is looked at. Shorter ones are exact, longer ones up to so much late.
TICK = 5.0


class Deadline:
    """Calls `late` when nobody moved or cleared it in time; it may be set again afterwards. `close` ends it.

    `lives`, where given, is asked at every look whether there was a sign of life since the last one: then the deadline
    moves as if it were set now, which is a look too late at most.
    """

    __slots__ = ("_at", "_late", "_lives", "_loop", "_rings_at", "_seconds", "_timer")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, late: Callable[[], None], lives: Callable[[], bool] | None = None
    ) -> None:
        self._loop = loop
        self._late = late
        self._lives = lives
        self._at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = 0.0
        self._seconds = 0.0

    def set(self, seconds: float) -> None:
        """So long from now on, whatever it was."""
        self._at = at = self._loop.time() + seconds
        self._seconds = seconds
        if self._timer is None:
            self._arm(at)
        elif seconds < TICK and self._rings_at > at:
            self._timer.cancel()
            self._arm(at)

    def clear(self) -> None:
        """Nothing is waited for."""
        self._at = None

    def close(self) -> None:
        """Nothing will be waited for."""
        self._at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self, at: float) -> None:
        self._rings_at = min(at, self._loop.time() + TICK)
        self._timer = self._loop.call_at(self._rings_at, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if self._at is None:
            return
        if self._lives is not None and self._lives():
            self.set(self._seconds)
        elif self._loop.time() < self._at:
            self._arm(self._at)
        else:
            self._at = None
            self._late()
