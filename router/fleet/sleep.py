"""Workers that are put to sleep and woken. One that sleeps computes nothing, and gets no requests.

That an engine was put to sleep behind the router's back is in its metrics, where it tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from enum import StrEnum

import aiohttp

from router.fleet.fleet import Fleet
from router.fleet.told import Told, tell
from router.fleet.worker import Worker

# Requests under way may have to end first, and weights to be loaded.
_SECONDS = 600.0


class SleepMode(StrEnum):
    """What becomes of the requests that a worker has."""

    WAIT = "wait"  # it sleeps when they have ended
    ABORT = "abort"
    KEEP = "keep"  # they go on when it is woken


async def put_to_sleep(
    fleet: Fleet, session: aiohttp.ClientSession, workers: Sequence[Worker], level: int, mode: SleepMode
) -> list[Told]:
    """Put workers to sleep by vLLM's `/sleep`. They get no requests from now on, or go on as before where it fails.

    `level`: 0 keeps weights and cache, 1 keeps the weights in CPU memory, 2 nothing.
    """

    async def one(worker: Worker) -> Told:
        before, worker.sleep_in_change = worker.asleep, True
        fleet.set_asleep(worker, True)
        try:
            told = await tell(session, worker, "/sleep", _SECONDS, query={"level": str(level), "mode": mode})
            if not told.well:
                fleet.set_asleep(worker, before)
        finally:
            worker.sleep_in_change = False
        return told

    return await asyncio.gather(*map(one, workers))


async def wake(fleet: Fleet, session: aiohttp.ClientSession, workers: Sequence[Worker]) -> list[Told]:
    """Wake workers by vLLM's `/wake_up`."""

    async def one(worker: Worker) -> Told:
        told = await tell(session, worker, "/wake_up", _SECONDS)
        if told.well:
            fleet.set_asleep(worker, False)
        return told

    return await asyncio.gather(*map(one, workers))
