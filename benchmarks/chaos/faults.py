"""Faults of workers, and their repair."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from benchmarks.chaos.load import flood
from benchmarks.chaos.workers import SimulatedWorker

FLOOD_REQUESTS = 24


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault. `strike` returns at once, or at the fault's own end. `mend` restores the worker.

    With `holds_streams`, open streams of the worker end only after `mend`, which may then be called twice.
    """

    name: str
    strike: Callable[[SimulatedWorker, float], Awaitable[None]]
    mend: Callable[[SimulatedWorker], Awaitable[None]]
    holds_streams: bool = False


async def _kill(worker: SimulatedWorker, _: float) -> None:
    worker.signal(signal.SIGKILL)
    worker.stop()


async def _hang(worker: SimulatedWorker, _: float) -> None:
    worker.signal(signal.SIGSTOP)


async def _resume(worker: SimulatedWorker) -> None:
    worker.signal(signal.SIGCONT)


async def _slow(worker: SimulatedWorker, seconds: float) -> None:
    await flood(worker.url, FLOOD_REQUESTS, seconds)


async def _restart(worker: SimulatedWorker, _: float) -> None:
    await asyncio.to_thread(worker.stop)
    await worker.start_again()


async def _refuse(worker: SimulatedWorker, _: float) -> None:
    await asyncio.to_thread(worker.stop)
    await worker.refuse_everything()


async def _start_again(worker: SimulatedWorker) -> None:
    await worker.start_again()


async def _nothing(_: SimulatedWorker) -> None:
    pass


KILL = Fault("killed", _kill, _start_again)
HANG = Fault("hung", _hang, _resume, holds_streams=True)
SLOW = Fault("busy with others", _slow, _nothing)
RESTART = Fault("restarted", _restart, _nothing)
REFUSE = Fault("refusing", _refuse, _start_again)
ALL = (KILL, HANG, SLOW, RESTART, REFUSE)
