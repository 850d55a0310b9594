"""One run: a load, faults in its phases, and a table of what each phase lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.load import Stream, keep_streaming
from benchmarks.chaos.workers import ChaosFleet, SimulatedWorker

STRIKE_AFTER = 1.0
_USED = ("ready", "warming")


@dataclass(frozen=True, slots=True)
class Plan:
    """The size of the load, its duration, and the speed of the workers."""

    workers: int = 8
    streams: int = 200
    seconds: float = 10.0
    tokens: int = 20
    step_ms: float = 200.0


@dataclass(frozen=True, slots=True)
class Phase:
    """The streams of one phase.

    `noticed`: seconds from the fault until the worker was ejected; `None` if it was not.
    """

    name: str
    streams: list[Stream]
    victim: str = ""
    noticed: float | None = None

    @property
    def lost(self) -> list[Stream]:
        """The requests without any answer."""
        return [stream for stream in self.streams if stream.first_byte is None]

    @property
    def broken(self) -> list[Stream]:
        """The answers that began and did not end correctly."""
        return [stream for stream in self.streams if stream.first_byte is not None and not stream.complete]

    @property
    def moved(self) -> int:
        """The requests that were answered by another worker than the first attempted one."""
        return sum(stream.attempts > 1 for stream in self.streams)

    def to_others(self) -> list[float]:
        """Return the seconds to the first byte of requests that the struck worker had no part in."""
        return sorted(
            stream.first_byte
            for stream in self.streams
            if stream.first_byte is not None and stream.attempts == 1 and stream.worker != self.victim
        )

    def p99(self) -> float:
        """Return the 99th percentile of `to_others`."""
        seconds = self.to_others()
        return seconds[min(int(len(seconds) * 0.99), len(seconds) - 1)]


@dataclass(frozen=True, slots=True)
class Result:
    """All phases, and the reservations at the end."""

    phases: list[Phase]
    left_over: int


async def run_chaos(plan: Plan, faults: Sequence[Fault]) -> Result:
    """Start all processes, play the phases, and end all processes."""
    async with ChaosFleet(plan.workers, plan.step_ms) as fleet:
        await keep_streaming(fleet.url, plan.streams, 1.0, plan.tokens)  # warms connections, code and caches
        phases = [Phase("undisturbed", await keep_streaming(fleet.url, plan.streams, plan.seconds, plan.tokens))]
        for fault, victim in zip(faults, fleet.workers, strict=False):
            phases.append(await _disturbed(fleet, plan, fault, victim))
            if fault is not faults[-1]:
                await fault.mend(victim)
                await fleet.until_used(victim)
        return Result(phases, await _left_over(fleet))


async def _disturbed(fleet: ChaosFleet, plan: Plan, fault: Fault, victim: SimulatedWorker) -> Phase:
    streaming = asyncio.create_task(keep_streaming(fleet.url, plan.streams, plan.seconds, plan.tokens))
    await asyncio.sleep(STRIKE_AFTER)
    struck = time.monotonic()
    striking = asyncio.ensure_future(fault.strike(victim, plan.seconds - STRIKE_AFTER))
    noticed = None
    while noticed is None and time.monotonic() < struck + plan.seconds - STRIKE_AFTER:
        if await fleet.state(victim) not in _USED:
            noticed = time.monotonic() - struck
        await asyncio.sleep(0.05)
    await striking
    if fault.holds_streams:
        await asyncio.wait([streaming], timeout=plan.seconds / 2)
        await fault.mend(victim)
    return Phase(fault.name, await streaming, victim.url, noticed)


async def _left_over(fleet: ChaosFleet) -> int:
    """Return the reservations after all streams have ended and the router has noticed it."""
    left = await fleet.left_over()
    deadline = time.monotonic() + 5
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
        left = await fleet.left_over()
    return left


_COLUMNS = ("phase", "requests", "lost", "broken off", "moved", "noticed after s", "p99 TTFT ms", "ratio")


def table(result: Result) -> str:
    """Format one row for each phase. `lost` had no answer; p99 and its ratio are of requests to other workers."""
    usual = result.phases[0].p99()
    rows = [
        (
            phase.name,
            str(len(phase.streams)),
            str(len(phase.lost)),
            str(len(phase.broken)),
            str(phase.moved),
            "" if phase.noticed is None else f"{phase.noticed:.1f}",
            f"{phase.p99() * 1000:.0f}",
            f"{phase.p99() / usual:.2f}",
        )
        for phase in result.phases
    ]
    widths = [max(map(len, cells)) for cells in zip(_COLUMNS, *rows, strict=True)]
    lines = [_COLUMNS, tuple("-" * width for width in widths), *rows]
    text = "\n".join("| " + " | ".join(map(str.ljust, line, widths)) + " |" for line in lines)
    return f"{text}\n\nStill reserved at the end: {result.left_over}"
