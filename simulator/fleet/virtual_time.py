"""An event loop with virtual time: it never sleeps, and its clock jumps to the next timer."""

from __future__ import annotations

import asyncio


class VirtualTimeLoop(asyncio.BaseEventLoop):
    """An event loop for timers, callbacks, futures and tasks only, in the order of asyncio's own loops.

    The clock starts at 0, and does not advance while a callback runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._selector = self

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def select(self, timeout: float | None) -> list[None]:
        """Advance the clock to the next timer. Raises RuntimeError without one, because the loop would wait forever."""
        if timeout is None:
            raise RuntimeError("Deadlock in virtual time: no timer is scheduled, and the awaited future is not done.")
        self._now += timeout
        return []

    def _process_events(self, events: list[None]) -> None:
        """Return at once: the loop watches no file descriptors."""
