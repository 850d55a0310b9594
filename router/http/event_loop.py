"""What waits on the event loop: deadlines of connections, and background tasks that are to end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

# Seconds after which a deadline that was moved is looked at. Shorter ones are exact, longer ones late by up to that.
TICK = 5.0


def _nothing() -> None:
    """What a closed deadline calls."""


class Deadline:
    """Calls `late` when it was not moved or cleared in time; it may be set again afterwards. `close` ends it.

    One that is set while another is watched begins with the next look at the clock, which is a tick later at most.
    `lives`, where given, is asked at every look whether there was a sign of life since the last one: then it is as if
    it were set again.
    """

    __slots__ = ("_at", "_late", "_lives", "_loop", "_moved", "_rings_at", "_seconds", "_tick", "_timer", "_waits")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, late: Callable[[], None], lives: Callable[[], bool] | None = None
    ) -> None:
        self._loop = loop
        self._late = late
        self._lives = lives
        self._moved = False
        self._tick = TICK
        self._waits = False
        self._seconds = 0.0
        self._at = 0.0
        self._rings_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float) -> None:
        """In `seconds` from now on, whatever it was."""
        self._waits = True
        self._seconds = seconds
        if self._timer is not None and seconds >= self._tick:
            self._moved = True
        else:
            self._begin()

    def clear(self) -> None:
        """Nothing is waited for."""
        self._waits = False

    def close(self) -> None:
        """Nothing will be waited for, and no reference to the callbacks is kept."""
        self._waits = False
        self._late, self._lives = _nothing, None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        now = time.monotonic()
        self._moved = False
        self._at = now + self._seconds
        if self._timer is not None:
            if self._rings_at <= self._at:
                return
            self._timer.cancel()
        self._arm(now)

    def _arm(self, now: float) -> None:
        left = min(self._at - now, self._tick)
        self._rings_at = now + left
        self._timer = self._loop.call_later(left, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if not self._waits:
            return
        if (self._lives is not None and self._lives()) or self._moved:
            self._begin()
            return
        now = time.monotonic()
        if now < self._at:
            self._arm(now)
        else:
            self._waits = False
            self._late()


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
