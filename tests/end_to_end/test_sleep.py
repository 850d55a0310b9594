"""Workers that are put to sleep and woken, through the router or directly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_under_test import QUICK, Reply, RouterUnderTest, router, until
from scripted_worker import Exchange, scripted_worker

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

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


async def post(routed: RouterUnderTest, path: str) -> Reply:
    return await routed.call(path, {}, headers=TOKEN)


async def states(routed: RouterUnderTest) -> list[str]:
    return [worker["state"] for worker in await routed.workers()]


async def test_sleeping_worker_receives_no_requests_and_holds_nothing(routed: RouterUnderTest, urls: list[str]) -> None:
    first = (await ask(routed)).worker
    (other,) = (url for url in urls if url != first)
    reply = await post(routed, f"/sleep?worker={first}")
    assert [(each["worker"], each["status"]) for each in reply.json()["workers"]] == [(first, 200)]
    assert sorted(await states(routed)) == ["asleep", "ready"]
    assert [(await ask(routed)).worker for _ in range(4)] == [other] * 4
    assert (await post(routed, f"/wake_up?worker={first}")).status == 200
    assert await states(routed) == ["ready", "ready"]
    matches = (await routed.call("/match", {"model": "simulated", "prompt": PROMPT})).json()["matches"]
    assert {match["worker"]: match["matched_tokens"] > 0 for match in matches} == {first: False, other: True}


async def test_requests_wait_until_a_worker_wakes(routed: RouterUnderTest) -> None:
    under_way = asyncio.ensure_future(ask(routed, tokens=20))

    await until(routed.workers, lambda workers: any(worker["requests_in_flight"] for worker in workers))
    assert (await post(routed, "/sleep")).status == 200
    assert (await under_way).status == 200  # the request in flight finishes first
    assert await states(routed) == ["asleep", "asleep"]
    waiting = asyncio.ensure_future(ask(routed))

    await routed.until_metric(1, "kvrouter_model_demand", model="simulated")
    assert (await post(routed, "/wake_up")).status == 200
    assert (await waiting).status == 200


async def test_sleep_is_sent_after_requests_in_flight_end() -> None:
    received, may_end = list[str](), asyncio.Event()

    async def script(exchange: Exchange) -> None:
        if not exchange.target.startswith("/sleep"):
            await may_end.wait()
        received.append(exchange.target)
        await exchange.answer()

    async with scripted_worker(script) as worker, router(worker.url, server={"token": "t"}) as routed:
        under_way = asyncio.ensure_future(routed.call("/v1/completions", {"model": "m", "prompt": PROMPT}))

        await until(lambda: worker.exchanges)
        slept = asyncio.ensure_future(post(routed, "/sleep?level=2"))

        await until(lambda: states(routed), lambda found: found == ["asleep"])
        may_end.set()
        assert (await under_way).status == 200
        assert (await slept).status == 200
        assert received == ["/v1/completions", "/sleep?level=2&mode=wait"]


async def test_sleep_at_worker_is_detected(routed: RouterUnderTest) -> None:
    async def post_to_worker(url: str, path: str) -> None:
        async with routed.session.post(f"{url}{path}") as response:
            assert response.status == 200

    async def until_state(url: str, expected: str) -> None:
        await until(routed.workers, lambda workers: {each["url"]: each["state"] for each in workers}[url] == expected)

    for level, keeps in ((0, True), (1, False)):
        reply = await routed.call("/v1/completions", {**BODY, "prompt": f"{level} {PROMPT}"})
        slept = reply.worker
        await post_to_worker(slept, f"/sleep?level={level}")
        await until_state(slept, "asleep")
        assert (await ask(routed)).worker != slept
        await post_to_worker(slept, "/wake_up")
        await until_state(slept, "ready")
        matched = await routed.call("/match", {"model": "simulated", "prompt": f"{level} {PROMPT}"})
        held = {match["worker"]: match["matched_tokens"] for match in matched.json()["matches"]}
        assert (held[slept] > 0) is keeps


async def test_worker_without_sleep_stays_ready() -> None:
    async with (
        running(SimulatedWorkerSettings(disaggregation="sglang")) as sglang,
        router(sglang, server={"token": "t"}) as routed,
    ):
        reply = await post(routed, "/sleep")
        assert (reply.status, reply.error["code"]) == (502, "sleep")
        assert await states(routed) == ["ready"]
        assert (await ask(routed)).status == 200


@pytest.mark.parametrize("path", ["/sleep", "/wake_up"])
async def test_sleep_needs_admin_token(routed: RouterUnderTest, path: str) -> None:
    assert (await routed.call(path, {})).status == 401
    assert await states(routed) == ["ready", "ready"]


MODEL = "simulated"
PATH = "/v1/chat/completions"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "What does the file say? " * 20}], "max_tokens": 2}


async def explained(routed: RouterUnderTest, request: Any, headers: dict[str, str]) -> Any:
    return (await routed.call("/explain", {"path": PATH, "request": request}, headers=headers)).json()


def retained_tokens(answer: Any) -> dict[str, int]:
    return {each["worker"]: each["load"]["returning"] for each in answer["candidates"]}


async def test_session_keeps_its_location_until_its_last_request() -> None:
    settings = SimulatedWorkerSettings(base_step_s=0.001)
    async with running(settings) as one, running(settings) as two, router(one, two) as routed:
        bad = await routed.call(PATH, CHAT, headers={"x-kvrouter-next-call-ms": "soon"})
        assert (bad.status, bad.error["param"]) == (400, "x-kvrouter-next-call-ms")
        bad = await routed.call(PATH, CHAT | {"nvext": {"agent_hints": {"osl": "long"}}})
        assert (bad.status, bad.error["param"]) == (400, "nvext.agent_hints.osl")

        session = {"x-session-id": "agent-7"}
        answer = await explained(routed, CHAT, session)
        assert answer["hints"] is None
        assert set(retained_tokens(answer).values()) == {0}

        pausing = session | {"x-kvrouter-next-call-ms": "30000", "x-kvrouter-output-tokens": "40"}
        reply = await routed.call(PATH, CHAT, headers=pausing)
        assert reply.status == 200, reply.body
        answer = await explained(routed, CHAT, pausing)
        place = {"worker": reply.worker, "dp_rank": 0}
        assert answer["hints"] == {"output_tokens": 40, "next_call": 30.0, "final": None}
        assert (answer["working_set"]["state"], answer["working_set"]["charged"]) == ("idle", place)
        assert retained_tokens(answer)[reply.worker] == answer["tokens"]
        assert sum(retained_tokens(answer).values()) == answer["tokens"]

        closing = CHAT | {"nvext": {"session_control": {"session_id": "agent-7", "action": "close"}}}
        assert (await explained(routed, closing, {}))["working_set"]["charged"] == place
        assert (await routed.call(PATH, closing)).status == 200
        answer = await explained(routed, closing, {})
        assert answer["hints"] == {"output_tokens": None, "next_call": None, "final": True}
        assert (answer["working_set"]["state"], answer["working_set"]["charged"]) == ("new", None)
        assert set(retained_tokens(answer).values()) == {0}


async def test_expected_output_length_changes_predicted_tpot() -> None:
    settings = SimulatedWorkerSettings(base_step_s=0.001)
    async with running(settings) as one, router(one, constants={"rates": {"context_token": 1e-4}}) as routed:
        request = CHAT | {"max_tokens": 5000}

        async def tpot(headers: dict[str, str]) -> float:
            answer = await explained(routed, request, headers)
            expected: float = answer["candidates"][0]["forecast"]["tpot"]["expected"]
            return expected

        usual = await tpot({})
        longer = await tpot({"x-kvrouter-output-tokens": "4256"})  # 256 until anything is learned
        assert longer == pytest.approx(usual + 2000 * 1e-4, rel=1e-6)
        assert await tpot({"x-kvrouter-output-tokens": "100000"}) == pytest.approx(usual + 2372 * 1e-4, rel=1e-6)
