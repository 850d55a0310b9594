"""Long bodies: a thread checks and parses them one after the other, while the event loop serves other requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from router.auth.bodies import ArrivingBodies

# Bodies of up to this size are parsed on the event loop: at most two milliseconds of work.
LONG_BODY: Final = 256 * 1024

T = TypeVar("T")


async def aside_if_long(body: bytes, read: Callable[[bytes], T]) -> T:
    """Return the result of `read`, which runs in a thread if the body is long."""
    return await asyncio.to_thread(read, body) if len(body) > LONG_BODY else read(body)


class LongBodies:
    """The thread for long bodies, with at most `limit` waiting bytes, which are counted as in `ArrivingBodies`."""

    def __init__(self, limit: int) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="long-bodies")
        self._waiting = ArrivingBodies(limit)

    async def read(self, size: int, work: Callable[[], T]) -> T:
        """Run `work`, which parses a body of `size` bytes. Raises RequestError (503) if too many bytes are waiting."""
        self._waiting.add(0, size)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, work)
        finally:
            self._waiting.end(size)

    async def close(self) -> None:
        """Stop the thread after its current work."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)
