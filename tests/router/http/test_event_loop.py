"""Deadlines that are moved without timers of their own."""

from __future__ import annotations

import asyncio
import time

import pytest

from router.http import event_loop
from router.http.event_loop import Deadline


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_loop, "TICK", 0.02)


def run(*steps: float | str) -> int:
    """Set a deadline (numbers above 0), clear or close it (words), wait (numbers below 0); how often it was late."""
    late = 0

    async def main() -> None:
        def ring() -> None:
            nonlocal late
            late += 1

        watched = Deadline(asyncio.get_running_loop(), ring)
        for step in steps:
            if step == "clear":
                watched.clear()
            elif step == "close":
                watched.close()
            elif float(step) > 0:
                watched.set(float(step))
            else:
                await asyncio.sleep(-float(step))

    asyncio.run(main())
    return late


async def test_deadline_is_never_early() -> None:
    loop = asyncio.get_running_loop()
    late, after = asyncio.Event(), list[float]()

    def ring() -> None:
        after.append(loop.time() - since)
        late.set()

    watched = Deadline(loop, ring)
    for _ in range(4):
        since = loop.time()
        watched.set(0.05)
        await asyncio.sleep(0.03)
    await asyncio.wait_for(late.wait(), 60)
    assert min(after) >= 0.05


@pytest.mark.parametrize(
    ("steps", "calls"),
    [
        ((0.05, -0.2), 1),
        ((0.005, -0.1), 1),
        ((10.0, -0.1), 0),
        ((10.0, 0.01, -0.1), 1),  # a shorter deadline replaces a longer one
        ((10.0, 0.05, -0.2), 1),
        ((0.05, "clear", -0.15), 0),
        ((0.05, "close", -0.15), 0),
        ((0.03, -0.1, 0.03, -0.1), 2),  # it can be set again
        ((0.03, "clear", -0.1, 0.03, -0.1), 1),
    ],
)
def test_deadline_is_called_once_each_time_it_passes(steps: tuple[float | str, ...], calls: int) -> None:
    assert run(*steps) == calls


async def test_progress_moves_a_deadline_that_is_not_cleared() -> None:
    late = asyncio.Event()
    signs = [True]  # one since it was set, which the next look finds
    watched = Deadline(asyncio.get_running_loop(), late.set, lambda: bool(signs) and signs.pop())
    began = time.monotonic()
    watched.set(0.05)
    await asyncio.wait_for(late.wait(), 60)
    assert time.monotonic() - began >= event_loop.TICK + 0.05
    late = asyncio.Event()
    watched = Deadline(asyncio.get_running_loop(), late.set, lambda: True)
    watched.set(0.03)
    watched.clear()
    await asyncio.sleep(0.1)
    assert not late.is_set()
