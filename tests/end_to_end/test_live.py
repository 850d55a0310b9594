"""The state of a fleet as it is told to those who look on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest
from router_under_test import RouterUnderTest, router

from router.observability.fleet_snapshot import MAX_VIEWERS
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

pytestmark = pytest.mark.anyio

CHAT = {"model": "simulated", "max_tokens": 2, "messages": [{"role": "user", "content": "a prompt " * 40}]}


@pytest.fixture(scope="module")
async def worker() -> AsyncIterator[str]:
    async with running(SimulatedWorkerSettings(dp_size=2)) as url:
        yield url


async def updates(routed: RouterUnderTest, **options: Any) -> AsyncIterator[dict[str, Any]]:
    """What `/live` tells, until the router ends it."""
    async with routed.request("/live", **options) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def test_a_viewer_is_told_everything_and_then_what_changes(worker: str) -> None:
    async with router(worker) as routed, aclosing(updates(routed)) as told, asyncio.timeout(60):
        first = await anext(told)
        assert {(row["worker"], row["dp_rank"]) for row in first["ranks"].values()} == {(worker, 0), (worker, 1)}
        assert {row["stream"] for row in first["ranks"].values()} <= {"live", "replaying", "connecting"}
        assert first["totals"]["up"] == 1
        answer = await routed.call("/v1/chat/completions", CHAT)
        held, requests, prefixes = 0, {}, []
        while not (held and prefixes and all(seen["whole_ms"] for seen in requests.values()) and requests):
            update = await anext(told)
            held = held or sum(row["held"]["gpu"] for row in update["ranks"].values())
            requests |= {seen["number"]: seen for seen in update["requests"]}
            prefixes = update.get("prefixes") or prefixes
        (seen,) = requests.values()
        assert seen["worker"] == answer.worker
        assert seen["tokens"] == answer.json()["usage"]["prompt_tokens"]
        assert seen["first_byte_ms"] <= seen["whole_ms"]
        assert prefixes[0]["share"] == 1
        assert "a prompt" not in json.dumps([seen, prefixes])


async def seen(told: AsyncIterator[dict[str, Any]], condition: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The first point of the series for which a condition holds."""
    async for update in told:
        for point in update["series"]:
            if condition(point):
                return point
    raise AssertionError("the feed ended")


async def test_tokens_and_what_the_cache_saved_are_drawn(worker: str) -> None:
    async with router(worker) as routed, aclosing(updates(routed)) as told, asyncio.timeout(60):
        for _ in range(2):
            await routed.call("/v1/chat/completions", CHAT)
        point = await seen(told, lambda point: point["generated"])
        assert point["prompt"] > 0
        assert (point["errors"], point["refused"], point["retried"]) == (0, 0, 0)
        while True:  # what the second one found is in the index
            await routed.call("/v1/chat/completions", CHAT)
            point = await seen(told, lambda point: point["requests"])
            if point["overlap"]:
                break
        assert point["saved"] > 0
        assert await routed.metric("kvrouter_completion_tokens_total", model="simulated") >= 4


async def test_refusals_are_drawn_and_a_model_without_workers_is_counted() -> None:
    async with running(SimulatedWorkerSettings()) as gone, router(gone) as routed:
        assert await routed.metric("kvrouter_model_workers", model="simulated") == 1
        async with aclosing(updates(routed)) as told, asyncio.timeout(60):
            await routed.call("/workers/drain", {"url": gone})
            assert (await routed.call("/v1/chat/completions", CHAT)).status == 503
            point = await seen(told, lambda point: point["refused"])
            assert point["errors"] == 0


async def test_a_viewer_is_told_who_answers_and_what_is_wrong(worker: str) -> None:
    async with router(worker, "http://127.0.0.1:9") as routed, aclosing(updates(routed)) as told, asyncio.timeout(60):
        first = await anext(told)
        health = (await routed.call("/health")).json()
        assert {name: first["about"][name] for name in ("version", "core", "policy")} == {
            name: health[name] for name in ("version", "core", "policy")
        }
        assert first["about"]["models"]["simulated"]["workers"] == 1
        assert first["about"]["models"]["simulated"]["tokens"].startswith("by ")
        assert [found["worker"] for found in first["findings"]] == ["http://127.0.0.1:9"]


async def test_nothing_is_told_without_the_token(worker: str) -> None:
    async with router(worker, server={"token": "admin"}) as routed:
        assert (await routed.call("/live")).status == 401
        assert (await routed.call("/ui")).status == 200
        headers = {"Authorization": "Bearer admin"}
        async with aclosing(updates(routed, headers=headers)) as told, asyncio.timeout(60):
            assert (await anext(told))["ranks"]


async def test_a_tenant_is_told_nothing(worker: str) -> None:
    tenants = {"named": {"one": {"keys": ["0" * 64]}}}
    async with router(worker, server={"token": "admin"}, tenants=tenants) as routed:
        assert (await routed.call("/ui")).status == 200
        assert (await routed.call("/live")).status == 401


async def test_a_worker_that_is_gone_is_told_of(worker: str) -> None:
    started = running(SimulatedWorkerSettings())
    async with started as other, router(worker) as routed, aclosing(updates(routed)) as told, asyncio.timeout(60):
        assert await routed.call("/workers", {"url": other})
        update = await anext(told)
        while not any(key.startswith(other) for key in update["ranks"]):
            update = await anext(told)
        await routed.call(f"/workers?url={other}", method="DELETE")
        while not any(key.startswith(other) for key in update["gone"]):
            update = await anext(told)


async def test_only_so_many_may_look_on(worker: str) -> None:
    async with router(worker) as routed, asyncio.timeout(60):
        viewers = [updates(routed) for _ in range(MAX_VIEWERS)]
        await asyncio.gather(*map(anext, viewers))
        refused = await routed.call("/live")
        assert (refused.status, refused.error["type"]) == (503, "service_unavailable")
        await asyncio.gather(*(viewer.aclose() for viewer in viewers))


async def test_viewers_do_not_hold_up_the_end(worker: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with router(worker) as routed:
            response = await session.get(f"{routed.url}/live")
            assert await response.content.readline()
        assert await asyncio.wait_for(response.read(), 60) is not None


async def test_the_page_loads_nothing_from_elsewhere(worker: str) -> None:
    async with router(worker) as routed:
        reply = await routed.call("/ui")
    page = reply.body.decode()
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert [
        line for line in page.splitlines() if "http" in line and "w3.org/2000/svg" not in line and "https?" not in line
    ] == []
