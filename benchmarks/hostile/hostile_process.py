"""The hostile clients, workers and streams, in a process of their own: what they compute holds up no customer.

That process is also asked to give way. Else its share of the cores, not the router, would be what customers wait for.
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
_EVENTS = 100.0  # messages of the hostile stream a second
_GIVES_WAY = 10  # added to its nice value
_STOP_SECONDS = 10.0


class HostileProcess:
    """`workers`: the hostile ones, as the settings name them."""

    def __init__(self, pipe: Connection, workers: list[dict[str, object]]) -> None:
        self.workers = workers
        self._pipe = pipe

    async def attack(self, url: str, until: float) -> tuple[Counter[int], int]:
        """Attack a router until that time of the monotonic clock: the statuses of the answers, 0 for none, and how
        many event messages were sent."""
        self._pipe.send((url, until))
        statuses, events = await asyncio.to_thread(self._pipe.recv)
        return statuses, events


@asynccontextmanager
async def hostile_process(seed: int) -> AsyncIterator[HostileProcess]:
    """Start it; it ends with the context."""
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
            await asyncio.to_thread(pipe.recv)  # the workers stay until the other side has seen enough
        except EOFError:
            pass
