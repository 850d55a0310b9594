"""Waits for conditions that have no event, each with a deadline."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

SECONDS = 60.0
# An interval between two looks is a tenth of the time waited so far, between these bounds: a look may be a request.
SHORTEST, LONGEST = 0.005, 0.1


def _interval(begin: float) -> float:
    return min(max((time.monotonic() - begin) / 10, SHORTEST), LONGEST)


def eventually(condition: Callable[[], object], what: str = "the condition holds", seconds: float = SECONDS) -> None:
    """Wait until a condition holds. Fails the test after the deadline."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() < begin + seconds, f"not before the deadline: {what}"
        time.sleep(_interval(begin))


async def until(get: Callable[[], Any], satisfied: Callable[[Any], object] = bool, *, seconds: float = SECONDS) -> None:
    """Call `get` until its result, awaited if it is awaitable, satisfies a condition."""
    begin = time.monotonic()
    async with asyncio.timeout(seconds):
        while True:
            found = get()
            if satisfied(await found if inspect.isawaitable(found) else found):
                return
            await asyncio.sleep(_interval(begin))
