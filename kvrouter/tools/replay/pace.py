"""When a recorded moment comes round again."""

from __future__ import annotations

import asyncio
import time


class Pace:
    """Recorded times as times to wait for: `speed` times as fast as they were, or, with None, at once."""

    def __init__(self, started_at: float, speed: float | None) -> None:
        self._recorded_start = started_at
        self._speed = speed
        self._start = time.monotonic()

    async def wait_for(self, recorded_at: float) -> None:
        """Sleep until the moment has come; other tasks get their turn in any case."""
        delay = 0.0
        if self._speed is not None:
            delay = self._start + (recorded_at - self._recorded_start) / self._speed - time.monotonic()
        await asyncio.sleep(max(delay, 0))
