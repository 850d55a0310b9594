"""Many deadlines by one timer."""

from __future__ import annotations

import asyncio

from router.picker.state import Deadlines


async def test_deadlines_are_called_in_order_unless_dropped() -> None:
    called: list[str] = []
    done = asyncio.Event()
    deadlines = Deadlines(0.02)
    for name in ("a", "dropped", "b"):
        deadlines.set(name, lambda name=name: called.append(name))  # type: ignore[misc]
    deadlines.drop("dropped")
    deadlines.drop("unknown")
    deadlines.set("later", done.set)
    async with asyncio.timeout(60):
        await done.wait()
    assert called == ["a", "b"]
    deadlines.set("never", lambda: called.append("never"))
    deadlines.close()
    done.clear()
    others = Deadlines(0.03)
    others.set("after", done.set)
    async with asyncio.timeout(60):
        await done.wait()
    assert called == ["a", "b"]
