"""Time as a test wants it: a manual clock, and waiting for a condition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Clock:
    """Stands where `time.monotonic` does; `now` is what it says."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition holds that has no event."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
