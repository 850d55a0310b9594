"""The state of the picker: many deadlines by one timer, and the limit of arriving bodies."""

from __future__ import annotations

import asyncio

import pytest

from http_api.errors import RequestError
from router.auth import ArrivingBodies
from router.picker.request_body import RequestBody
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
    await asyncio.wait_for(done.wait(), 60)
    assert called == ["a", "b"]
    deadlines.set("never", lambda: called.append("never"))
    deadlines.close()
    done.clear()
    others = Deadlines(0.03)
    others.set("after", done.set)
    await asyncio.wait_for(done.wait(), 60)
    assert called == ["a", "b"]


async def test_arriving_bodies_share_one_limit() -> None:
    arrivals = ArrivingBodies(100)
    first, second = RequestBody(arrivals), RequestBody(arrivals)
    first.add(b"x" * 60)
    with pytest.raises(RequestError) as refused:
        second.add(b"y" * 60)
    assert refused.value.status == 503
    second.end_arrival()
    first.add(b"x" * 30)
    assert arrivals.bytes == 90
    for _ in range(2):  # once it is whole, and when its call is over
        first.end_arrival()
    assert arrivals.bytes == 0
    assert first.whole() == b"x" * 90
