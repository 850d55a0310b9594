"""Workers that sleep: put to sleep and woken through the router, or behind its back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_under_test import QUICK, Reply, RouterUnderTest, router, until
from scripted_worker import MODEL, Exchange, scripted_worker

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

pytestmark = pytest.mark.anyio

TOKEN = {"authorization": "Bearer t"}
PROMPT = "The worker that holds the longest prefix answers soonest. " * 8
BODY = {"model": "simulated", "prompt": PROMPT, "max_tokens": 2}


@pytest.fixture
async def routed(urls: list[str]) -> AsyncIterator[RouterUnderTest]:
    settings: dict[str, Any] = {"fleet": QUICK, "admission": {"cold_start_timeout": 60}}
    async with router(*urls, server={"token": "t"}, **settings) as routed:
        yield routed


async def ask(routed: RouterUnderTest, tokens: int = 2) -> Reply:
    return await routed.call("/v1/completions", {**BODY, "max_tokens": tokens})


async def tell(routed: RouterUnderTest, path: str) -> Reply:
    return await routed.call(path, {}, headers=TOKEN)


async def states(routed: RouterUnderTest) -> list[str]:
    return [worker["state"] for worker in await routed.workers()]


async def test_who_sleeps_gets_no_requests_and_holds_nothing(routed: RouterUnderTest, urls: list[str]) -> None:
    first = (await ask(routed)).worker
    (other,) = (url for url in urls if url != first)
    reply = await tell(routed, f"/sleep?worker={first}")
    assert [(each["worker"], each["status"]) for each in reply.json()["workers"]] == [(first, 200)]
    assert sorted(await states(routed)) == ["asleep", "ready"]
    assert [(await ask(routed)).worker for _ in range(4)] == [other] * 4
    assert (await tell(routed, f"/wake_up?worker={first}")).status == 200
    assert await states(routed) == ["ready", "ready"]
    matches = (await routed.call("/match", {"model": "simulated", "prompt": PROMPT})).json()["matches"]
    assert {match["worker"]: match["matched_tokens"] > 0 for match in matches} == {first: False, other: True}


async def test_requests_wait_until_somebody_wakes(routed: RouterUnderTest) -> None:
    under_way = asyncio.ensure_future(ask(routed, tokens=20))

    async def sent() -> bool:
        return any(worker["requests_in_flight"] for worker in await routed.workers())

    await until(sent)
    assert (await tell(routed, "/sleep")).status == 200
    assert (await under_way).status == 200  # who had begun was waited for
    assert await states(routed) == ["asleep", "asleep"]
    waiting = asyncio.ensure_future(ask(routed))

    async def counted() -> bool:
        return await routed.metric("kvrouter_model_demand", model="simulated") == 1

    await until(counted)
    assert (await tell(routed, "/wake_up")).status == 200
    assert (await waiting).status == 200


async def test_a_worker_is_told_once_the_requests_sent_to_it_have_ended() -> None:
    came, may_end = list[str](), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if not exchange.target.startswith("/sleep"):
            await may_end.wait()
        came.append(exchange.target)
        await exchange.answer()

    async with scripted_worker(script) as worker, router(worker.url, server={"token": "t"}) as routed:
        under_way = asyncio.ensure_future(routed.call("/v1/completions", {"model": MODEL, "prompt": PROMPT}))

        async def sent() -> bool:
            return bool(worker.exchanges)

        await until(sent)
        told = asyncio.ensure_future(tell(routed, "/sleep?level=2"))

        async def asleep() -> bool:
            return await states(routed) == ["asleep"]

        await until(asleep)
        may_end.set()
        assert (await under_way).status == 200
        assert (await told).status == 200
        assert came == ["/v1/completions", "/sleep?level=2&mode=wait"]


async def test_sleep_behind_the_routers_back_is_noticed(routed: RouterUnderTest) -> None:
    async def tell_worker(url: str, path: str) -> None:
        async with routed.session.post(f"{url}{path}") as response:
            assert response.status == 200

    async def says(url: str, expected: str) -> None:
        async def said() -> bool:
            return {each["url"]: each["state"] for each in await routed.workers()}[url] == expected

        await until(said)

    for level, keeps in ((0, True), (1, False)):
        reply = await routed.call("/v1/completions", {**BODY, "prompt": f"{level} {PROMPT}"})
        slept = reply.worker
        await tell_worker(slept, f"/sleep?level={level}")
        await says(slept, "asleep")
        assert (await ask(routed)).worker != slept
        await tell_worker(slept, "/wake_up")
        await says(slept, "ready")
        matched = await routed.call("/match", {"model": "simulated", "prompt": f"{level} {PROMPT}"})
        held = {match["worker"]: match["matched_tokens"] for match in matched.json()["matches"]}
        assert (held[slept] > 0) is keeps


async def test_a_worker_that_cannot_sleep_goes_on() -> None:
    async with (
        running(SimulatedWorkerSettings(disaggregation="sglang")) as sglang,
        router(sglang, server={"token": "t"}) as routed,
    ):
        reply = await tell(routed, "/sleep")
        assert (reply.status, reply.error["code"]) == (502, "sleep")
        assert await states(routed) == ["ready"]
        assert (await ask(routed)).status == 200


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
async def test_it_wants_the_operators_token(routed: RouterUnderTest, path: str) -> None:
    assert (await routed.call(path, {})).status == 401
    assert await states(routed) == ["ready", "ready"]
