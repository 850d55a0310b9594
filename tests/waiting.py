"""Waits for conditions that have no event, each with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

SECONDS = 60.0


def eventually(condition: Callable[[], object], what: str = "the condition holds", seconds: float = SECONDS) -> None:
    """Wait until a condition holds. Fails the test after the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not before the deadline: {what}"
        time.sleep(0.005)


async def until(get: Callable[[], Any], satisfied: Callable[[Any], object] = bool, *, seconds: float = SECONDS) -> None:
    """Call `get` until its result, awaited if it is awaitable, satisfies a condition."""
    async with asyncio.timeout(seconds):
        while True:
            found = get()
            if satisfied(await found if inspect.isawaitable(found) else found):
                return
            await asyncio.sleep(0.005)
