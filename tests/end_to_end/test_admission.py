"""Requests that wait in the router: while workers are at their limits, and while the best one is busy."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from router_under_test import QUICK, Reply, RouterUnderTest, router, until
from scripted_worker import MODEL, Exchange, scripted_worker

from router.auth import hashed_key
from router.prediction.slo import SLO
from router.routing.assignment import Selection
from router.routing.slo_selection import SLOSelector
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
ONE_AT_A_TIME = {"requests": 1, "late_binding": False}
LONG = 30_000  # tokens: more than an engine computes in a step


class Gate:
    """A worker's script: every request waits until the test lets it go on."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self._let_through = asyncio.Semaphore(0)

    async def __call__(self, exchange: Exchange) -> None:
        self.arrived.append(json.loads(exchange.body)["user"])
        await self._let_through.acquire()
        await exchange.answer()

    def open(self, times: int = 1) -> None:
        for _ in range(times):
            self._let_through.release()


class Prefills:
    """A worker's script: streams whose first bytes the test lets come, and which end at once then."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.arrived = self.gate.arrived

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.begin_chunks()
        self.arrived.append(json.loads(exchange.body)["user"])
        await self.gate._let_through.acquire()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.chunk(b"")


class Asking:
    """Requests under way, by the name that the worker knows them by."""

    def __init__(self, routed: RouterUnderTest) -> None:
        self._routed = routed
        self._tasks: dict[str, asyncio.Task[Reply]] = {}

    async def __aenter__(self) -> Asking:
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def send(self, name: str, headers: dict[str, str] | None = None, tokens: int = 4, **fields: Any) -> None:
        first = sum(map(ord, name))  # no two share a prefix
        body = {"model": MODEL, "prompt": list(range(first, first + tokens)), "user": name} | fields
        self._tasks[name] = asyncio.create_task(self._routed.call(PATH, body, headers=headers))

    async def queued(self, name: str, *headers: Any, **fields: Any) -> None:
        """Send one that has to wait, and see that it does."""
        before = await self.waiting()
        self.send(name, *headers, **fields)
        await self.until_waiting(before + 1)

    async def waiting(self) -> int:
        queue = (await self._routed.call("/health")).json()["queue"]
        return sum(queue.values())

    async def until_waiting(self, count: int) -> None:
        async def wait() -> bool:
            return await self.waiting() == count

        await until(wait)

    async def reply(self, name: str) -> Reply:
        return await self._tasks.pop(name)

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks.pop(name), return_exceptions=True)


async def until_arrived(gate: Gate | Prefills, count: int) -> None:
    async def arrived() -> bool:
        return len(gate.arrived) >= count

    await until(arrived)


@asynccontextmanager
async def one_worker(
    gate: Gate, limits: dict[str, Any], **sections: Any
) -> AsyncIterator[tuple[RouterUnderTest, Asking]]:
    """A router in front of a worker that is at its limit: it has the request `first`."""
    async with (
        scripted_worker(gate) as worker,
        router(worker.url, admission=limits, **sections) as routed,
        Asking(routed) as asking,
    ):
        asking.send("first", headers=sections.get("headers"))
        await until_arrived(gate, 1)
        yield routed, asking


# At the limits


async def test_a_request_waits_for_the_end_of_another() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME) as (routed, asking):
        await asking.queued("second")
        assert gate.arrived == ["first"]
        assert await routed.metric("kvrouter_admission_queue_length", priority="normal") == 1
        assert [rank["saturated"] for rank in (await routed.workers())[0]["ranks"]] == [True]
        gate.open(2)
        assert (await asking.reply("second")).status == 200
        assert await routed.metric("kvrouter_admission_wait_seconds_count", reason="saturated") == 1
        assert await asking.waiting() == 0
        await asking.reply("first")
        await routed.until_released()


async def test_the_limit_in_tokens_lets_one_through_that_is_larger_than_it() -> None:
    gate = Gate()
    async with (
        scripted_worker(gate) as worker,
        router(worker.url, admission={"tokens": 100}) as routed,
        Asking(routed) as asking,
    ):
        asking.send("large", tokens=500)
        await until_arrived(gate, 1)
        await asking.queued("small", tokens=10)
        gate.open()
        await until_arrived(gate, 2)
        asking.send("another small", tokens=90)  # 100 in all
        await until_arrived(gate, 3)
        gate.open(2)
        for name in ("large", "small", "another small"):
            assert (await asking.reply(name)).status == 200


async def test_a_large_prompt_is_not_overtaken_by_small_ones_for_ever() -> None:
    gate = Gate()
    async with (
        scripted_worker(gate) as worker,
        router(worker.url, admission={"tokens": 100}) as routed,
        Asking(routed) as asking,
    ):
        asking.send("first", tokens=60)
        await until_arrived(gate, 1)
        await asking.queued("large", tokens=80)
        await asking.queued("small", tokens=10)  # it would fit
        gate.open()
        await until_arrived(gate, 3)
        assert gate.arrived == ["first", "large", "small"]
        gate.open(2)


async def test_a_better_priority_overtakes_by_body_or_header() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME) as (routed, asking):
        await asking.queued("usual")
        await asking.queued("low", priority=5)
        await asking.queued("high", priority=-1)
        await asking.queued("highest", {"x-kvrouter-priority": "-2"}, priority=9)
        for priority, count in (("high", 2), ("normal", 1), ("low", 1)):
            assert await routed.metric("kvrouter_admission_queue_length", priority=priority) == count
        gate.open(5)
        await until_arrived(gate, 5)
        assert gate.arrived == ["first", "highest", "high", "usual", "low"]


def tenants(**settings: dict[str, Any]) -> dict[str, Any]:
    named = {name: {"keys": [hashed_key(name)], **each} for name, each in settings.items()}
    return {"tenants": {"named": named}, "server": {"token": "admin"}}


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


async def test_tenants_take_turns_however_much_one_of_them_sends() -> None:
    gate = Gate()
    async with (
        scripted_worker(gate) as worker,
        router(worker.url, admission=ONE_AT_A_TIME, **tenants(a={}, b={})) as routed,
        Asking(routed) as asking,
    ):
        asking.send("first", key("a"))
        await until_arrived(gate, 1)
        for number in range(4):
            await asking.queued(f"a{number}", key("a"))
        for number in range(2):
            await asking.queued(f"b{number}", key("b"))
        gate.open(7)
        await until_arrived(gate, 7)
        assert sorted(gate.arrived[1:5]) == ["a0", "a1", "b0", "b1"]
        assert gate.arrived[5:] == ["a2", "a3"]


async def test_a_tenants_priority_is_bounded_here_and_at_the_engine() -> None:
    gate = Gate()
    sections = tenants(gold={"priority": -5}, plain={})
    async with (
        scripted_worker(gate) as worker,
        router(worker.url, admission=ONE_AT_A_TIME, **sections) as routed,
        Asking(routed) as asking,
    ):
        asking.send("first", key("plain"), priority=-9)
        await until_arrived(gate, 1)
        assert json.loads(worker.last.body)["priority"] == 0
        await asking.queued("greedy", key("plain"), priority=-9)
        await asking.queued("gold", key("gold"))
        gate.open(3)
        await until_arrived(gate, 3)
        assert gate.arrived == ["first", "gold", "greedy"]


async def test_who_has_waited_too_long_is_told_when_to_come_again() -> None:
    """As the OpenAI client sees it, with a real engine that is slow."""
    settings = SimulatedWorkerSettings(base_step_s=0.02)
    async with (
        running(settings) as worker,
        router(worker, admission=ONE_AT_A_TIME | {"timeout": 0.3}) as routed,
    ):
        client = routed.openai.completions
        first = asyncio.create_task(client.create(model="simulated", prompt="one", max_tokens=100))

        async def begun() -> bool:
            return await routed.requests_in_flight() == 1

        await until(begun)
        with pytest.raises(openai.RateLimitError) as refusal:
            await client.create(model="simulated", prompt="two", max_tokens=1)
        error = refusal.value
        assert (error.code, error.type) == ("queue_timeout", "rate_limit_error")
        assert 1 <= int(error.response.headers["retry-after"]) <= 60
        assert await routed.metric("kvrouter_admission_refused_total", reason="queue_timeout") == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await routed.until_released()


async def test_who_waits_until_its_promise_cannot_be_kept_is_refused_then() -> None:
    gate = Gate()
    levels = {"strict": {"ttft": 0.3, "when_late": "refuse"}, "patient": {"ttft": 0.3}}
    async with one_worker(gate, ONE_AT_A_TIME, service_levels=levels) as (routed, asking):
        await asking.queued("patient", {"x-kvrouter-service-level": "patient"})
        asking.send("strict", {"x-kvrouter-service-level": "strict"})
        refused = await asking.reply("strict")
        assert (refused.status, refused.error["code"]) == (429, "promise_not_kept")
        assert int(refused.headers["retry-after"]) >= 1
        assert await routed.metric("kvrouter_promises_total", service_level="strict", outcome="refused") == 1
        gate.open(2)
        assert (await asking.reply("patient")).status == 200  # late


async def test_a_full_queue_refuses_at_once_or_sheds_what_is_lower() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME | {"queue": 1}) as (routed, asking):
        await asking.queued("low", priority=1)
        asking.send("as low", priority=1)
        refused = await asking.reply("as low")
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        asking.send("high")
        shed = await asking.reply("low")
        assert (shed.status, shed.error["code"]) == (429, "queue_full")
        assert await routed.metric("kvrouter_admission_refused_total", reason="queue_full") == 2
        gate.open(2)
        assert (await asking.reply("high")).status == 200


async def test_the_bodies_that_wait_are_bounded() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME | {"queue_bytes": 1000}) as (_, asking):
        await asking.queued("small", priority=1)
        asking.send("large", tokens=1000)  # nobody has to give way to what could never wait
        assert (await asking.reply("large")).status == 429
        gate.open(2)
        assert (await asking.reply("small")).status == 200


async def test_the_time_to_come_again_follows_from_how_fast_places_come_free() -> None:
    gate = Gate()
    gate.open(40)
    async with (
        scripted_worker(gate) as worker,
        router(worker.url, admission=ONE_AT_A_TIME | {"queue": 1}) as routed,
        Asking(routed) as asking,
    ):
        for number in range(40):
            asking.send(f"{number}")
            assert (await asking.reply(f"{number}")).status == 200
        asking.send("first")
        await until_arrived(gate, 41)
        await asking.queued("second")
        asking.send("third")
        assert (await asking.reply("third")).headers["retry-after"] == "1"  # 40 a second, so far
        gate.open(2)
        await asking.reply("second")


async def test_a_client_that_leaves_is_not_waited_for() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME | {"queue": 1}) as (routed, asking):
        await asking.queued("leaves")
        await asking.leave("leaves")
        await asking.until_waiting(0)
        await asking.queued("stays")
        gate.open(2)
        assert (await asking.reply("stays")).status == 200
        assert gate.arrived == ["first", "stays"]
        await routed.until_released()


async def test_a_worker_that_comes_up_takes_what_waits() -> None:
    gate, second_gate = Gate(), Gate()
    async with scripted_worker(gate) as one, scripted_worker(second_gate) as two:
        await two.stop()
        fleet = QUICK | {"slow_start": 0}
        async with (
            router(one.url, two.url, admission=ONE_AT_A_TIME, fleet=fleet) as routed,
            Asking(routed) as asking,
        ):
            asking.send("first")
            await until_arrived(gate, 1)
            await asking.queued("second")
            await two.start()
            await until_arrived(second_gate, 1)
            gate.open()
            second_gate.open()
            assert (await asking.reply("second")).worker == two.url


async def test_a_draining_worker_takes_nothing_until_it_is_used_again() -> None:
    gate, drained = Gate(), Gate()
    async with (
        scripted_worker(gate) as one,
        scripted_worker(drained) as two,
        router(one.url, two.url, admission=ONE_AT_A_TIME) as routed,
        Asking(routed) as asking,
    ):
        assert (await routed.call("/workers/drain", {"url": two.url})).status == 200
        asking.send("first")
        await until_arrived(gate, 1)
        await asking.queued("second")
        assert (await routed.call("/workers/undrain", {"url": two.url})).status == 200
        await until_arrived(drained, 1)


async def test_other_models_do_not_wait_behind() -> None:
    """One model's workers being full holds up nobody else."""
    gate = Gate()
    settings = SimulatedWorkerSettings(model="other", base_step_s=0.001)
    async with (
        scripted_worker(gate) as worker,
        running(settings) as other,
        router(worker.url, other, admission=ONE_AT_A_TIME) as routed,
        Asking(routed) as asking,
    ):
        asking.send("first")
        await until_arrived(gate, 1)
        await asking.queued("second")
        reply = await routed.call(PATH, {"model": "other", "prompt": "x", "max_tokens": 1})
        assert (reply.status, reply.worker) == (200, other)


async def test_explain_tells_where_a_request_goes_while_the_cheapest_is_full() -> None:
    scripts: dict[str, Gate] = {}
    async with AsyncExitStack() as stack:
        for script in (Gate(), Gate()):
            scripts[(await stack.enter_async_context(scripted_worker(script))).url] = script
        routed = await stack.enter_async_context(router(*scripts, admission=ONE_AT_A_TIME))
        asking = await stack.enter_async_context(Asking(routed))
        request = {"model": MODEL, "prompt": list(range(LONG))}
        asking.send("first", prompt=request["prompt"])

        async def arrived() -> bool:
            return any(script.arrived for script in scripts.values())

        await until(arrived)
        full = next(url for url, script in scripts.items() if script.arrived)
        told = (await routed.call("/explain", {"path": PATH, "request": request})).json()
        assert told["candidates"][0]["worker"] == full  # it holds the prompt, or will soon
        assert (told["held"], told["choice"]["worker"] in scripts.keys() - {full}) == (None, True)
        scripts[full].open()


async def test_a_rush_on_real_engines_is_answered_within_the_limits() -> None:
    settings = SimulatedWorkerSettings(base_step_s=0.002)
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(running(settings)) for _ in range(2)]
        routed = await stack.enter_async_context(router(*urls, admission={"requests": 3}))
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, *(load["requests"] for load in await routed.loads()))
                await asyncio.sleep(0.005)

        watching = asyncio.create_task(watch())
        create = routed.openai.completions.create
        answers = await asyncio.gather(
            *(create(model="simulated", prompt=f"{number} words", max_tokens=8) for number in range(40))
        )
        watching.cancel()
        assert all(answer.usage and answer.usage.completion_tokens == 8 for answer in answers)
        assert most == 3
        assert await routed.metric("kvrouter_admission_wait_seconds_count", reason="saturated") >= 30
        await routed.until_released()


# Late binding


@asynccontextmanager
async def busy_fleet(
    policy: str = "kv_aware", **limits: Any
) -> AsyncIterator[tuple[RouterUnderTest, Asking, list[Prefills]]]:
    """Two workers, each with a long prompt to compute."""
    scripts = [Prefills(), Prefills()]
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted_worker(script)) for script in scripts]
        urls = [worker.url for worker in workers]
        slow = {"token": 0.004}  # a long prompt is expected to take two minutes
        routed = await stack.enter_async_context(router(*urls, admission=limits, policy={"name": policy}, rates=slow))
        asking = await stack.enter_async_context(Asking(routed))
        for count, name in enumerate(("one", "two")):
            asking.send(name, tokens=LONG, stream=True)

            async def arrived(count: int = count) -> bool:
                return sum(len(script.arrived) for script in scripts) == count + 1

            await until(arrived)
        assert [len(script.arrived) for script in scripts] == [1, 1]
        yield routed, asking, scripts
        for script in scripts:
            script.gate.open(9)


async def until_sent(name: str, scripts: list[Prefills]) -> None:
    """Wait until a request has come to any worker."""

    async def sent() -> bool:
        return any(name in script.arrived for script in scripts)

    await until(sent)


async def test_while_all_are_busy_a_request_chooses_when_a_first_byte_comes() -> None:
    async with busy_fleet() as (routed, asking, scripts):
        await asking.queued("held", tokens=LONG, stream=True)
        told = await routed.call("/explain", {"path": PATH, "request": {"model": MODEL, "prompt": [1, 2, 3]}})
        assert told.json()["held"] == "late_binding"
        scripts[1].gate.open()
        await until_arrived(scripts[1], 2)
        assert scripts[1].arrived[1] == "held"
        assert await routed.metric("kvrouter_admission_wait_seconds_count", reason="late_binding") == 1
        told = await routed.call("/explain", {"path": PATH, "request": {"model": MODEL, "prompt": [1, 2, 3]}})
        assert told.json()["held"] == "late_binding"  # it is busy again


async def test_the_short_ones_that_are_held_go_first() -> None:
    async with busy_fleet() as (_, asking, scripts):
        await asking.queued("long", tokens=3 * LONG, stream=True)
        await asking.queued("short", tokens=LONG, stream=True)
        scripts[0].gate.open()
        await until_arrived(scripts[0], 2)
        assert scripts[0].arrived == [scripts[0].arrived[0], "short"]


async def test_of_those_that_are_held_the_one_with_the_least_slack_goes_first() -> None:
    async with busy_fleet() as (_, asking, scripts):
        await asking.queued("patient", {"x-slo-ttft-ms": "900000"}, tokens=LONG, stream=True)
        await asking.queued("urgent", {"x-slo-ttft-ms": "600000"}, tokens=LONG, stream=True)
        scripts[0].gate.open()
        await until_arrived(scripts[0], 2)
        assert scripts[0].arrived == [scripts[0].arrived[0], "urgent"]


async def test_who_is_held_too_long_goes_to_its_choice() -> None:
    async with busy_fleet(timeout=0.2) as (_, asking, scripts):
        asking.send("held", tokens=LONG, stream=True)
        await until_sent("held", scripts)


async def test_who_has_lost_its_promise_lets_others_go_first_and_goes_in_the_end() -> None:
    async with busy_fleet(timeout=0.2) as (_, asking, scripts):
        arrived = scripts[0].arrived = scripts[1].arrived = list[str]()
        await asking.queued("late", {"x-slo-ttft-ms": "1"}, tokens=LONG, stream=True)
        asking.send("held", tokens=LONG, stream=True)
        await until_arrived(scripts[0], 2)
        assert arrived == ["held", "late"]


@pytest.mark.derives
async def test_of_those_that_are_late_few_choose_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """They want to go where their prefix is, which is busy, though the other worker is free."""
    chose: list[SLO] = []
    select = SLOSelector.select

    def counting(selector: SLOSelector, found: Any, usual: Selection, prompt: Any, slo: SLO, now: float) -> Selection:
        chose.append(slo)
        return select(selector, found, usual, prompt, slo, now)

    monkeypatch.setattr(SLOSelector, "select", counting)
    known = list(range(4 * LONG))
    async with busy_fleet() as (routed, asking, scripts):
        for script in scripts:
            script.gate.open()
        await routed.until_released()
        asking.send("known", prompt=known, stream=True)
        await until_sent("known", scripts)
        there, elsewhere = sorted(scripts, key=lambda script: "known" not in script.arrived)
        there.gate.open()
        await asking.reply("known")
        asking.send("three", tokens=LONG, stream=True)
        asking.send("four", tokens=LONG, stream=True)
        await until_arrived(there, 3)
        await until_arrived(elsewhere, 2)
        for number in range(6):
            await asking.queued(f"late {number}", {"x-slo-ttft-ms": "1"}, prompt=[*known, number], stream=True)
        elsewhere.gate.open()
        await asking.reply(elsewhere.arrived[-1])  # now it is known that they are late
        chose.clear()
        for count, name in enumerate(("five", "six"), start=1):
            asking.send(name, tokens=LONG, stream=True)
            await until_arrived(elsewhere, 2 + count)
            elsewhere.gate.open()
            await asking.reply(name)
            assert 2 * count <= len(chose) <= 4 * count  # when its first byte comes, and when it ends
        assert len(set(map(id, chose))) >= 4  # each in its turn
        assert await asking.waiting() == 6


async def test_a_full_queue_lets_go_of_who_is_late_and_sends_nobody_too_soon() -> None:
    async with busy_fleet(queue=1) as (routed, asking, scripts):
        await asking.queued("late", {"x-slo-ttft-ms": "1"}, tokens=LONG, stream=True)
        asking.send("held", tokens=LONG, stream=True)
        refused = await asking.reply("late")
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        await asking.until_waiting(1)
        asking.send("too late", {"x-slo-ttft-ms": "1"}, tokens=LONG, stream=True)
        assert (await asking.reply("too late")).status == 429
        assert await routed.metric("kvrouter_promises_total", outcome="refused") == 2
        assert [len(script.arrived) for script in scripts] == [1, 1]
        scripts[0].gate.open()
        await until_arrived(scripts[0], 2)
        assert scripts[0].arrived[1] == "held"


@pytest.mark.parametrize("policy", ["kv_aware", "lmetric"])
async def test_late_binding_can_be_switched_off_and_is_not_for_the_peers(policy: str) -> None:
    async with busy_fleet(policy, late_binding=policy != "kv_aware") as (_, asking, scripts):
        asking.send("third", tokens=LONG, stream=True)
        await until_sent("third", scripts)


@pytest.mark.parametrize("stream", [True, False])
async def test_nobody_is_held_where_there_is_no_other_worker_or_nothing_to_see(stream: bool) -> None:
    """Of answers that are not streamed nobody knows when their prefill ends."""
    gate = Gate()
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted_worker(gate)) for _ in range(1 if stream else 2)]
        routed = await stack.enter_async_context(router(*(worker.url for worker in workers)))
        asking = await stack.enter_async_context(Asking(routed))
        for number in range(6):
            asking.send(f"{number}", tokens=LONG, stream=stream)
        await until_arrived(gate, 6)
        gate.open(6)


# Deadlines


async def test_a_request_whose_deadline_comes_while_it_waits_is_not_sent() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME) as (routed, asking):
        for name, header in (("own", {"x-request-timeout": "0.1"}), ("client's", {"x-stainless-read-timeout": "0.1"})):
            asking.send(name, header)
            reply = await asking.reply(name)
            assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        assert await routed.metric("kvrouter_admission_refused_total", reason="deadline") == 2
        gate.open()
        await asking.reply("first")
        assert gate.arrived == ["first"]


async def test_an_answer_is_cut_off_at_the_deadline() -> None:
    left = asyncio.Event()

    async def never(exchange: Exchange) -> None:
        await exchange.left()
        left.set()

    async with scripted_worker(never) as worker, router(worker.url) as routed:
        body = {"model": MODEL, "prompt": "x"}
        reply = await routed.call(PATH, body, headers={"x-request-timeout": "0.2"})
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        await asyncio.wait_for(left.wait(), 60)
        await routed.until_released()
        assert (await routed.workers())[0]["state"] == "ready"


async def test_a_stream_that_has_begun_ends_with_an_error_at_the_deadline() -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.left()

    async with scripted_worker(endless) as worker, router(worker.url) as routed:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        reply = await routed.call(PATH, body, headers={"x-envoy-expected-rq-timeout-ms": "200"})
        assert reply.status == 200
        first, last = (line for line in reply.body.split(b"\n\n") if line)
        assert first == b"data: 1"
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
        await routed.until_released()


async def test_what_a_client_waits_for_a_byte_cuts_nothing_off() -> None:
    gate = Gate()
    async with (
        scripted_worker(gate) as worker,
        router(worker.url) as routed,
        Asking(routed) as asking,
    ):
        asking.send("slow", {"x-stainless-read-timeout": "0.1"})
        await until_arrived(gate, 1)
        await asyncio.sleep(0.2)
        gate.open()
        assert (await asking.reply("slow")).status == 200


async def test_headers_that_cannot_be_read_are_refused_by_name() -> None:
    async with scripted_worker() as worker, router(worker.url) as routed:
        for name in ("x-request-timeout", "x-kvrouter-priority"):
            reply = await routed.call(PATH, {"model": MODEL, "prompt": "x"}, headers={name: "soon"})
            assert (reply.status, reply.error["param"]) == (400, name)
        assert worker.exchanges == []


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async with scripted_worker() as worker, router(worker.url, server={"body_timeout": 0.2}) as routed:
        address = urlsplit(routed.url)
        reader, writer = await asyncio.open_connection(address.hostname, address.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
        began = time.monotonic()
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        assert head.startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - began < 30  # it might take 60 s by default
        writer.close()
