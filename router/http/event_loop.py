"""Deadlines of connections, calls that several callers share, and the end of background tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any, Generic, TypeVar

# Seconds between two checks of a deadline. A shorter deadline is exact; a longer one is late by at most this.
TICK = 5.0


def _nothing() -> None:
    """Ignore a call: the callback of a closed deadline."""


class Deadline:
    """A deadline that can be moved often, at the cost of an assignment.

    A deadline that is set while a timer runs starts at the timer's next check, at most `TICK` seconds later.
    """

    __slots__ = ("_at", "_late", "_lives", "_loop", "_moved", "_rings_at", "_seconds", "_tick", "_timer", "_waits")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, late: Callable[[], None], lives: Callable[[], bool] | None = None
    ) -> None:
        """Create a deadline that is not set. When it passes, `late` is called, or it starts again if `lives` allows."""
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
        """Set the deadline to `seconds` from now, in place of an earlier one."""
        self._waits = True
        self._seconds = seconds
        if self._timer is not None and seconds >= self._tick:
            self._moved = True
        else:
            self._begin()

    def clear(self) -> None:
        """Clear the deadline: `late` is not called."""
        self._waits = False

    def close(self) -> None:
        """Clear the deadline for good, and release its callbacks."""
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


T = TypeVar("T")


class SharedCalls(Generic[T]):
    """Calls by key: callers with the same key wait for the same call while it runs. `len` is the number that run."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Task[T]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    def start(self, key: Hashable, call: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
        """Return the task of a key's call, which starts unless it runs. A caller waits for it by `asyncio.shield`."""
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(call())
            task.add_done_callback(lambda done: self._ended(key, done))
        return task

    async def close(self) -> None:
        """Cancel all calls."""
        await end_tasks(self._running.values())

    def _ended(self, key: Hashable, task: asyncio.Task[T]) -> None:
        self._running.pop(key, None)
        read_error(task)


def read_error(future: asyncio.Future[T]) -> None:
    """Read the error of an ended future, so that there is no warning if no caller waits for it any longer."""
    if not future.cancelled():
        future.exception()


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait for their end."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
