"""The hostile clients, workers and streams in their own process, whose computation delays no customer.

The process also has a lower priority. Otherwise customers would wait for its share of the cores instead of the
router.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from random import Random

from benchmarks.hostile.intruders import Intruders
from benchmarks.hostile.workers import hostile_workers

_INTRUDERS = 40
_EVENTS = 100.0  # messages of the hostile stream per second
_GIVES_WAY = 10  # added to its nice value
_STOP_SECONDS = 10.0


class HostileProcess:
    """The hostile process. `workers` are the settings of its workers."""

    def __init__(self, pipe: Connection, workers: list[dict[str, object]]) -> None:
        self.workers = workers
        self._pipe = pipe

    async def attack(self, url: str, until: float) -> tuple[Counter[int], int]:
        """Attack a router until `until` on the monotonic clock.

        Return the statuses of the answers, 0 for none, and the number of event messages.
        """
        self._pipe.send((url, until))
        statuses, events = await asyncio.to_thread(self._pipe.recv)
        return statuses, events


@asynccontextmanager
async def hostile_process(seed: int) -> AsyncIterator[HostileProcess]:
    """Start the process, which ends with the context."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, seed), daemon=True)
    process.start()
    theirs.close()
    try:
        yield HostileProcess(ours, await asyncio.to_thread(ours.recv))
    finally:
        ours.close()
        await asyncio.to_thread(process.join, _STOP_SECONDS)
        process.kill()


def _main(pipe: Connection, seed: int) -> None:
    os.nice(_GIVES_WAY)
    asyncio.run(_run(pipe, Random(seed)))


async def _run(pipe: Connection, random: Random) -> None:
    async with hostile_workers(random) as (workers, stream):
        pipe.send(workers)
        try:
            url, until = await asyncio.to_thread(pipe.recv)
            intruders = Intruders(url, random)
            await asyncio.gather(intruders.run(_INTRUDERS, until), stream.run(_EVENTS, until))
            pipe.send((intruders.statuses, stream.sent))
            await asyncio.to_thread(pipe.recv)  # the workers run until the other side has finished
        except EOFError:
            pass
