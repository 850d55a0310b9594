"""The event loop with virtual time."""

from __future__ import annotations

import asyncio
import time

import pytest

from simulator.fleet.virtual_time import VirtualTimeLoop


def run_for_an_hour(loop: asyncio.AbstractEventLoop) -> list[tuple[str, float]]:
    """Return what ran, and when."""
    log: list[tuple[str, float]] = []
    start = loop.time()

    def note(name: str) -> None:
        log.append((name, round(loop.time() - start, 6)))

    async def main() -> None:
        loop.call_later(3600.0, note, "late")
        loop.call_later(0.5, note, "first")
        loop.call_later(0.6, note, "second")
        loop.call_later(0.4, note, "cancelled").cancel()
        loop.call_soon(note, "soon")
        future = loop.create_future()
        loop.call_later(1.0, future.set_result, None)
        await future
        note("future")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await loop.create_future()
        note("timeout")
        await asyncio.sleep(3600.0)

    loop.run_until_complete(main())
    loop.close()
    return log


def test_timers_run_at_their_time_without_sleeping() -> None:
    begun = time.monotonic()
    assert run_for_an_hour(VirtualTimeLoop()) == [
        ("soon", 0.0),
        ("first", 0.5),
        ("second", 0.6),
        ("future", 1.0),
        ("timeout", 3.0),
        ("late", 3600.0),
    ]
    assert time.monotonic() - begun < 60.0


def test_clock_stands_still_while_a_callback_runs() -> None:
    loop = VirtualTimeLoop()

    async def main() -> tuple[float, float]:
        await asyncio.sleep(1.5)
        before = loop.time()
        time.sleep(0.01)  # noqa: ASYNC251
        return before, loop.time()

    assert loop.run_until_complete(main()) == (1.5, 1.5)
    loop.close()


def test_wait_that_nothing_ends_is_an_error() -> None:
    loop = VirtualTimeLoop()

    async def main() -> None:
        await loop.create_future()

    with pytest.raises(RuntimeError, match="Deadlock in virtual time"):
        loop.run_until_complete(main())
    loop.close()
