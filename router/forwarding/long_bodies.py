"""Long bodies are checked and decoded in a thread, one after the other, while the event loop serves others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from router.auth.bodies import ArrivingBodies

# Bodies of no more bytes are read where they arrive: two milliseconds' work at most.
LONG_BODY: Final = 256 * 1024

T = TypeVar("T")


async def aside_if_long(body: bytes, read: Callable[[bytes], T]) -> T:
    """What is read of a body, in any thread where it is long. For those that the router answers itself."""
    return await asyncio.to_thread(read, body) if len(body) > LONG_BODY else read(body)


class LongBodies:
    """The thread, and what waits for it: `limit` bytes at most, as `ArrivingBodies` counts them."""

    def __init__(self, limit: int) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="long-bodies")
        self._waiting = ArrivingBodies(limit)

    async def read(self, size: int, work: Callable[[], T]) -> T:
        """Do what reads a body of so many bytes. Raises RequestError (503) where too much waits already."""
        self._waiting.add(0, size)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._waiting.end(size)

    async def close(self) -> None:
        """End the thread; what it has begun is finished first."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
