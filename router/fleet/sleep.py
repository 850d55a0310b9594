"""Workers that are put to sleep and woken. One that sleeps computes nothing, and gets no requests.

That an engine was put to sleep behind the router's back is in its metrics, where it tells.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, TypeAlias

import aiohttp

from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.fleet.worker_commands import Told, tell

# Requests under way may have to end first, and weights to be loaded.
_SECONDS = 600.0
_LOOK_SECONDS = 0.02


# What becomes of the requests that a worker has: it sleeps when they have ended, they end, or go on when it is woken.
SleepMode: TypeAlias = Literal["wait", "abort", "keep"]


async def put_to_sleep(
    fleet: Fleet, session: aiohttp.ClientSession, workers: Sequence[Worker], level: int, mode: SleepMode
) -> list[Told]:
    """Put workers to sleep by vLLM's `/sleep`. They get no requests from now on, or go on as before where it fails.

    `level`: 0 keeps weights and cache, 1 keeps the weights in CPU memory, 2 nothing. Where requests are waited for, the
    worker is told once those sent to it have ended, or some minutes later: it waits for others' by itself, but one that
    is still on its way when it falls asleep would be answered only when it wakes.
    """

    async def one(worker: Worker) -> Told:
        before, worker.sleep_in_change = worker.asleep, True
        fleet.set_asleep(worker, True)
        try:
            if mode == "wait":
                await _until_idle(worker)
            told = await tell(session, worker, "/sleep", _SECONDS, query={"level": str(level), "mode": mode})
            fleet.set_asleep(worker, told.well or before, keeps_cache=not (told.well and level))
        finally:
            worker.sleep_in_change = False
        return told

    return await asyncio.gather(*map(one, workers))


async def _until_idle(worker: Worker) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(_SECONDS):
            while worker.health.attempts:  # noqa: ASYNC110 - every request has one: their ends are not slowed for this
                await asyncio.sleep(_LOOK_SECONDS)


async def wake(fleet: Fleet, session: aiohttp.ClientSession, workers: Sequence[Worker]) -> list[Told]:
    """Wake workers by vLLM's `/wake_up`."""

    async def one(worker: Worker) -> Told:
        told = await tell(session, worker, "/wake_up", _SECONDS)
        if told.well:
            fleet.set_asleep(worker, False)
        return told

    return await asyncio.gather(*map(one, workers))
