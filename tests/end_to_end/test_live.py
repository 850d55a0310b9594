"""The live page's events, and `kvrouter top` in a terminal of its own."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest
from router_under_test import RouterUnderTest, router
from typer.testing import CliRunner

from kvrouter.cli import app
from router.observability.fleet_snapshot import MAX_VIEWERS
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

CHAT = {"model": "simulated", "max_tokens": 2, "messages": [{"role": "user", "content": "a prompt " * 40}]}


@pytest.fixture(scope="module")
async def worker() -> AsyncIterator[str]:
    async with running(SimulatedWorkerSettings(dp_size=2)) as url:
        yield url


async def updates(routed: RouterUnderTest, **options: Any) -> AsyncIterator[dict[str, Any]]:
    """Yield the updates of `/live` until the router ends the stream."""
    async with routed.request("/live", **options) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def test_live_sends_snapshot_then_changes(worker: str) -> None:
    async with router(worker) as routed, aclosing(updates(routed)) as feed, asyncio.timeout(60):
        first = await anext(feed)
        assert {(row["worker"], row["dp_rank"]) for row in first["ranks"].values()} == {(worker, 0), (worker, 1)}
        assert {row["stream"] for row in first["ranks"].values()} <= {"live", "replaying", "connecting"}
        assert first["totals"]["up"] == 1
        answer = await routed.call("/v1/chat/completions", CHAT)
        held, requests, prefixes = 0, {}, []
        while not (held and prefixes and all(request["whole_ms"] for request in requests.values()) and requests):
            update = await anext(feed)
            held = held or sum(row["held"]["gpu"] for row in update["ranks"].values())
            requests |= {request["number"]: request for request in update["requests"]}
            prefixes = update.get("prefixes") or prefixes
        (request,) = requests.values()
        assert request["worker"] == answer.worker
        assert request["tokens"] == answer.json()["usage"]["prompt_tokens"]
        assert request["first_byte_ms"] <= request["whole_ms"]
        assert prefixes[0]["share"] == 1
        assert "a prompt" not in json.dumps([request, prefixes])


async def first_point(
    feed: AsyncIterator[dict[str, Any]], condition: Callable[[dict[str, Any]], object]
) -> dict[str, Any]:
    """The first point of the series for which a condition holds."""
    async for update in feed:
        for point in update["series"]:
            if condition(point):
                return point
    raise AssertionError("the feed ended")


async def test_live_series_has_tokens_and_cache_savings(worker: str) -> None:
    async with router(worker) as routed, aclosing(updates(routed)) as feed, asyncio.timeout(60):
        for _ in range(2):
            await routed.call("/v1/chat/completions", CHAT)
        point = await first_point(feed, lambda point: point["generated"])
        assert point["prompt"] > 0
        assert (point["errors"], point["refused"], point["retried"]) == (0, 0, 0)
        while True:  # what the second one found is in the index
            await routed.call("/v1/chat/completions", CHAT)
            point = await first_point(feed, lambda point: point["requests"])
            if point["overlap"]:
                break
        assert point["saved"] > 0
        assert await routed.metric("kvrouter_completion_tokens_total", model="simulated") >= 4


async def test_live_series_has_refusals() -> None:
    async with running(SimulatedWorkerSettings()) as gone, router(gone) as routed:
        assert await routed.metric("kvrouter_model_workers", model="simulated") == 1
        async with aclosing(updates(routed)) as feed, asyncio.timeout(60):
            await routed.call("/workers/drain", {"url": gone})
            assert (await routed.call("/v1/chat/completions", CHAT)).status == 503
            point = await first_point(feed, lambda point: point["refused"])
            assert point["errors"] == 0


async def test_live_has_version_and_findings(worker: str) -> None:
    async with router(worker, "http://127.0.0.1:9") as routed, aclosing(updates(routed)) as feed, asyncio.timeout(60):
        first = await anext(feed)
        health = await routed.health()
        assert {name: first["about"][name] for name in ("version", "core", "policy")} == {
            name: health[name] for name in ("version", "core", "policy")
        }
        assert first["about"]["models"]["simulated"]["workers"] == 1
        assert first["about"]["models"]["simulated"]["tokens"].startswith("by ")
        assert [found["worker"] for found in first["findings"]] == ["http://127.0.0.1:9"]


async def test_live_needs_admin_token(worker: str) -> None:
    async with router(worker, server={"token": "admin"}) as routed:
        assert (await routed.call("/live")).status == 401
        assert (await routed.call("/ui")).status == 200
        headers = {"Authorization": "Bearer admin"}
        async with aclosing(updates(routed, headers=headers)) as feed, asyncio.timeout(60):
            assert (await anext(feed))["ranks"]


async def test_live_is_closed_to_tenants(worker: str) -> None:
    tenants = {"named": {"one": {"keys": ["0" * 64]}}}
    async with router(worker, server={"token": "admin"}, tenants=tenants) as routed:
        assert (await routed.call("/ui")).status == 200
        assert (await routed.call("/live")).status == 401


async def test_live_reports_removed_worker(worker: str) -> None:
    started = running(SimulatedWorkerSettings())
    async with started as other, router(worker) as routed, aclosing(updates(routed)) as feed, asyncio.timeout(60):
        assert await routed.call("/workers", {"url": other})
        update = await anext(feed)
        while not any(key.startswith(other) for key in update["ranks"]):
            update = await anext(feed)
        await routed.call(f"/workers?url={other}", method="DELETE")
        while not any(key.startswith(other) for key in update["gone"]):
            update = await anext(feed)


async def test_number_of_viewers_is_bounded(worker: str) -> None:
    async with router(worker) as routed, asyncio.timeout(60):
        viewers = [updates(routed) for _ in range(MAX_VIEWERS)]
        await asyncio.gather(*map(anext, viewers))
        refused = await routed.call("/live")
        assert (refused.status, refused.error["type"]) == (503, "service_unavailable")
        await asyncio.gather(*(viewer.aclose() for viewer in viewers))


async def test_viewers_do_not_delay_shutdown(worker: str) -> None:
    async with aiohttp.ClientSession() as session:
        async with router(worker) as routed:
            response = await session.get(f"{routed.url}/live")
            assert await response.content.readline()
        assert await asyncio.wait_for(response.read(), 60) is not None


async def test_page_loads_no_external_files(worker: str) -> None:
    async with router(worker) as routed:
        reply = await routed.call("/ui")
    page = reply.body.decode()
    assert "default-src 'none'" in reply.headers["content-security-policy"]
    assert [
        line for line in page.splitlines() if "http" in line and "w3.org/2000/svg" not in line and "https?" not in line
    ] == []


COMMAND = [sys.executable, "-m", "kvrouter", "top", "--url"]


async def test_top_once_prints_fleet() -> None:
    async with running(SimulatedWorkerSettings()) as worker, router(worker, server={"token": "admin"}) as routed:
        output = await printed(routed.url, "--token", "admin", "--once")
        assert worker.removeprefix("http://") in output
        assert "ready" in output
        assert "1 of 1" in output
        refused = await printed(routed.url, "--once", status=1)
        assert "--token" in refused


async def test_top_reports_unreachable_router() -> None:
    assert "http://127.0.0.1:9" in await printed("http://127.0.0.1:9", status=1)


async def test_top_updates_and_reacts_to_keys() -> None:
    async with running(SimulatedWorkerSettings()) as worker, router(worker) as routed:
        ours, theirs = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
        process = await asyncio.create_subprocess_exec(
            *COMMAND, routed.url, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
        )
        os.close(theirs)
        os.set_blocking(ours, False)
        shown = bytearray()
        asyncio.get_running_loop().add_reader(ours, lambda: shown.extend(read(ours)))
        try:
            async with asyncio.timeout(60):
                await until_shown(shown, worker.removeprefix("http://").encode())
                os.write(ours, b"r")
                await until_shown(shown, "requests ▾".encode())
                os.write(ours, b"q")
                assert await process.wait() == 0
        finally:
            asyncio.get_running_loop().remove_reader(ours)
            os.close(ours)
            if process.returncode is None:
                process.kill()
                await process.wait()


def read(number: int) -> bytes:
    try:
        return os.read(number, 65536)
    except OSError:  # its other side is closed
        return b""


async def until_shown(shown: bytearray, text: bytes) -> None:
    while text not in shown:  # noqa: ASYNC110 - a terminal sets no event
        await asyncio.sleep(0.02)


async def printed(*arguments: str, status: int = 0) -> str:
    ended = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--url", *arguments], env={"COLUMNS": "160"})
    assert ended.exit_code == status, ended.output
    return ended.output
