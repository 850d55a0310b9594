"""Requests that wait in the router: while workers are at their limits, and while the best one is busy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from router_under_test import QUICK, Reply, RouterUnderTest, router, until
from scripted_worker import MODEL, Exchange, ScriptedWorker, scripted_worker, scripted_workers

from router.auth import hashed_key
from router.prediction.slo import SLO
from router.routing.assignment import Selection
from router.routing.selector import SLOSelector
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

PATH = "/v1/completions"
ONE_AT_A_TIME = {"requests": 1, "late_binding": False}
LONG = 30_000  # tokens: more than an engine computes in a step


class Gate:
    """A worker's script in which every request waits until the test opens the gate."""

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
    """A worker's script that streams one event per request when the test opens the gate."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.arrived = self.gate.arrived

    async def __call__(self, exchange: Exchange) -> None:
        await exchange.begin_chunks()
        self.arrived.append(json.loads(exchange.body)["user"])
        await self.gate._let_through.acquire()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.chunk(b"")


class Requests:
    """Requests in flight, by the name that their worker receives as `user`."""

    def __init__(self, routed: RouterUnderTest) -> None:
        self._routed = routed
        self._tasks: dict[str, asyncio.Task[Reply]] = {}

    async def __aenter__(self) -> Requests:
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
        """Send a request, and wait until it is in the queue."""
        before = await self._routed.queued()
        self.send(name, *headers, **fields)
        await self._routed.until_queued(before + 1)

    async def reply(self, name: str) -> Reply:
        return await self._tasks.pop(name)

    async def leave(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.gather(self._tasks.pop(name), return_exceptions=True)


async def until_arrived(gate: Gate | Prefills, count: int) -> None:
    await until(lambda: len(gate.arrived) >= count)


@asynccontextmanager
async def fleet(
    *scripts: Gate | Prefills, **sections: Any
) -> AsyncIterator[tuple[RouterUnderTest, Requests, list[ScriptedWorker]]]:
    """Run a router in front of a worker for each script."""
    async with (
        scripted_workers(*scripts) as workers,
        router(*(worker.url for worker in workers), **sections) as routed,
        Requests(routed) as requests,
    ):
        yield routed, requests, workers


@asynccontextmanager
async def one_worker(
    gate: Gate, limits: dict[str, Any], **sections: Any
) -> AsyncIterator[tuple[RouterUnderTest, Requests]]:
    """Run a router in front of a worker that is at its limit with the request `first`."""
    async with fleet(gate, admission=limits, **sections) as (routed, requests, _):
        requests.send("first")
        await until_arrived(gate, 1)
        yield routed, requests


# At the limits


async def test_request_waits_until_another_ends() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME) as (routed, requests):
        await requests.queued("second")
        assert gate.arrived == ["first"]
        assert await routed.metric("kvrouter_admission_queue_length", priority="normal") == 1
        assert [rank["saturated"] for rank in (await routed.workers())[0]["ranks"]] == [True]
        gate.open(2)
        second = await requests.reply("second")
        assert second.status == 200
        assert int(second.headers["x-kvrouter-waited-ms"]) > 0
        assert await routed.metric("kvrouter_admission_wait_seconds_count", reason="saturated") == 1
        assert await routed.queued() == 0
        assert "x-kvrouter-waited-ms" not in (await requests.reply("first")).headers
        await routed.until_released()


async def test_token_limit_admits_single_larger_request() -> None:
    gate = Gate()
    async with fleet(gate, admission={"tokens": 100}) as (_, requests, _):
        requests.send("large", tokens=500)
        await until_arrived(gate, 1)
        await requests.queued("small", tokens=10)
        gate.open()
        await until_arrived(gate, 2)
        requests.send("another small", tokens=90)  # 100 in all
        await until_arrived(gate, 3)
        gate.open(2)
        for name in ("large", "small", "another small"):
            assert (await requests.reply(name)).status == 200


async def test_large_prompt_is_not_overtaken_by_small_ones() -> None:
    gate = Gate()
    async with fleet(gate, admission={"tokens": 100}) as (_, requests, _):
        requests.send("first", tokens=60)
        await until_arrived(gate, 1)
        await requests.queued("large", tokens=80)
        await requests.queued("small", tokens=10)  # it would fit
        gate.open()
        await until_arrived(gate, 3)
        assert gate.arrived == ["first", "large", "small"]
        gate.open(2)


async def test_better_priority_in_body_or_header_overtakes() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME) as (routed, requests):
        await requests.queued("usual")
        await requests.queued("low", priority=5)
        await requests.queued("high", priority=-1)
        await requests.queued("highest", {"x-kvrouter-priority": "-2"}, priority=9)
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


async def test_tenants_take_turns_regardless_of_load() -> None:
    gate = Gate()
    async with fleet(gate, admission=ONE_AT_A_TIME, **tenants(a={}, b={})) as (_, requests, _):
        requests.send("first", key("a"))
        await until_arrived(gate, 1)
        for number in range(4):
            await requests.queued(f"a{number}", key("a"))
        for number in range(2):
            await requests.queued(f"b{number}", key("b"))
        gate.open(7)
        await until_arrived(gate, 7)
        assert sorted(gate.arrived[1:5]) == ["a0", "a1", "b0", "b1"]
        assert gate.arrived[5:] == ["a2", "a3"]


async def test_programs_of_a_tenant_take_turns() -> None:
    """The first run has many subagents, by the names that Claude Code sends; another one has a single agent."""
    gate = Gate()
    async with fleet(gate, admission=ONE_AT_A_TIME, **tenants(a={}, b={})) as (_, requests, _):
        requests.send("first", key("b"))
        await until_arrived(gate, 1)
        for number in range(4):
            names = {"x-claude-code-session-id": "run-1", "x-claude-code-agent-id": f"agent-{number}"}
            await requests.queued(f"run{number}", key("a") | names)
        await requests.queued("other", key("a") | {"x-claude-code-session-id": "run-2"})
        gate.open(6)
        await until_arrived(gate, 6)
        assert gate.arrived[1:] == ["run0", "other", "run1", "run2", "run3"]


async def test_tenant_priority_is_bounded_in_queue_and_engine() -> None:
    gate = Gate()
    sections = tenants(gold={"priority": -5}, plain={})
    async with fleet(gate, admission=ONE_AT_A_TIME, **sections) as (_, requests, [worker]):
        requests.send("first", key("plain"), priority=-9)
        await until_arrived(gate, 1)
        assert json.loads(worker.last.body)["priority"] == 0
        await requests.queued("greedy", key("plain"), priority=-9)
        await requests.queued("gold", key("gold"))
        gate.open(3)
        await until_arrived(gate, 3)
        assert gate.arrived == ["first", "gold", "greedy"]


async def test_queue_timeout_is_refused_with_retry_after() -> None:
    """The OpenAI client raises a rate limit error while a slow simulated worker is busy."""
    settings = SimulatedWorkerSettings(base_step_s=0.02)
    async with (
        running(settings) as worker,
        router(worker, admission=ONE_AT_A_TIME | {"timeout": 0.3}) as routed,
    ):
        client = routed.openai.completions
        first = asyncio.create_task(client.create(model="simulated", prompt="one", max_tokens=100))

        await until(routed.requests_in_flight, lambda count: count == 1)
        with pytest.raises(openai.RateLimitError) as refusal:
            await client.create(model="simulated", prompt="two", max_tokens=1)
        error = refusal.value
        assert (error.code, error.type) == ("queue_timeout", "rate_limit_error")
        assert 1 <= int(error.response.headers["retry-after"]) <= 60
        assert await routed.metric("kvrouter_admission_refused_total", reason="queue_timeout") == 1
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await routed.until_released()


async def test_waiting_request_is_refused_once_slo_is_missed() -> None:
    gate = Gate()
    levels = {"strict": {"ttft": 0.3, "when_late": "refuse"}, "patient": {"ttft": 0.3}}
    async with one_worker(gate, ONE_AT_A_TIME, service_levels=levels) as (routed, requests):
        await requests.queued("patient", {"x-kvrouter-service-level": "patient"})
        requests.send("strict", {"x-kvrouter-service-level": "strict"})
        refused = await requests.reply("strict")
        assert (refused.status, refused.error["code"]) == (429, "slo_not_met")
        assert int(refused.headers["retry-after"]) >= 1
        assert await routed.metric("kvrouter_slo_answers_total", service_level="strict", outcome="refused") == 1
        gate.open(2)
        assert (await requests.reply("patient")).status == 200  # late


async def test_full_queue_refuses_or_sheds_lower_priority() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME | {"queue": 1}) as (routed, requests):
        await requests.queued("low", priority=1)
        requests.send("as low", priority=1)
        refused = await requests.reply("as low")
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        requests.send("high")
        shed = await requests.reply("low")
        assert (shed.status, shed.error["code"]) == (429, "queue_full")
        assert await routed.metric("kvrouter_admission_refused_total", reason="queue_full") == 2
        gate.open(2)
        assert (await requests.reply("high")).status == 200


async def test_bytes_of_waiting_bodies_are_bounded() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME | {"queue_bytes": 1000}) as (_, requests):
        await requests.queued("small", priority=1)
        requests.send("large", tokens=1000)  # a request that exceeds the bound sheds no other
        assert (await requests.reply("large")).status == 429
        gate.open(2)
        assert (await requests.reply("small")).status == 200


async def test_retry_after_follows_the_rate_of_places() -> None:
    gate = Gate()
    gate.open(40)
    async with fleet(gate, admission=ONE_AT_A_TIME | {"queue": 1}) as (_, requests, _):
        for number in range(40):
            requests.send(f"{number}")
            assert (await requests.reply(f"{number}")).status == 200
        requests.send("first")
        await until_arrived(gate, 41)
        await requests.queued("second")
        requests.send("third")
        assert (await requests.reply("third")).headers["retry-after"] == "1"  # 40 a second, so far
        gate.open(2)
        await requests.reply("second")


async def test_disconnected_request_leaves_the_queue() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME | {"queue": 1}) as (routed, requests):
        await requests.queued("leaves")
        await requests.leave("leaves")
        await routed.until_queued(0)
        await requests.queued("stays")
        gate.open(2)
        assert (await requests.reply("stays")).status == 200
        assert gate.arrived == ["first", "stays"]
        await routed.until_released()


async def test_worker_that_comes_up_receives_waiting_request() -> None:
    gate, second_gate = Gate(), Gate()
    async with scripted_worker(gate) as one, scripted_worker(second_gate) as two:
        await two.stop()
        fleet = QUICK | {"slow_start": 0}
        async with (
            router(one.url, two.url, admission=ONE_AT_A_TIME, fleet=fleet) as routed,
            Requests(routed) as requests,
        ):
            requests.send("first")
            await until_arrived(gate, 1)
            await requests.queued("second")
            await two.start()
            await until_arrived(second_gate, 1)
            gate.open()
            second_gate.open()
            assert (await requests.reply("second")).worker == two.url


async def test_drained_worker_receives_requests_only_after_undrain() -> None:
    gate, drained = Gate(), Gate()
    async with fleet(gate, drained, admission=ONE_AT_A_TIME) as (routed, requests, [_, two]):
        assert (await routed.call("/workers/drain", {"url": two.url})).status == 200
        requests.send("first")
        await until_arrived(gate, 1)
        await requests.queued("second")
        assert (await routed.call("/workers/undrain", {"url": two.url})).status == 200
        await until_arrived(drained, 1)


async def test_full_workers_of_one_model_do_not_block_another() -> None:
    """Requests of a model are answered while the workers of another model are full."""
    gate = Gate()
    settings = SimulatedWorkerSettings(model="other", base_step_s=0.001)
    async with (
        scripted_worker(gate) as worker,
        running(settings) as other,
        router(worker.url, other, admission=ONE_AT_A_TIME) as routed,
        Requests(routed) as requests,
    ):
        requests.send("first")
        await until_arrived(gate, 1)
        await requests.queued("second")
        reply = await routed.call(PATH, {"model": "other", "prompt": "x", "max_tokens": 1})
        assert (reply.status, reply.worker) == (200, other)


async def test_explain_names_choice_while_cheapest_worker_is_full() -> None:
    gates = Gate(), Gate()
    async with fleet(*gates, admission=ONE_AT_A_TIME) as (routed, requests, workers):
        scripts = {worker.url: gate for worker, gate in zip(workers, gates, strict=True)}
        request = {"model": MODEL, "prompt": list(range(LONG))}
        requests.send("first", prompt=request["prompt"])

        await until(lambda: any(script.arrived for script in scripts.values()))
        full = next(url for url, script in scripts.items() if script.arrived)
        explained = (await routed.call("/explain", {"path": PATH, "request": request})).json()
        assert explained["candidates"][0]["worker"] == full  # it holds the prompt, or will soon
        assert (explained["held"], explained["choice"]["worker"] in scripts.keys() - {full}) == (None, True)
        scripts[full].open()


async def test_burst_is_answered_within_admission_limits() -> None:
    settings = SimulatedWorkerSettings(base_step_s=0.01)
    async with (
        running(settings) as one,
        running(settings) as two,
        router(one, two, admission={"requests": 3}) as routed,
    ):
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
) -> AsyncIterator[tuple[RouterUnderTest, Requests, list[Prefills]]]:
    """Run a router in front of two workers that each compute a long prompt."""
    scripts = [Prefills(), Prefills()]
    slow = {"token": 0.004}  # a long prompt is expected to take two minutes
    settings = {"admission": limits, "policy": {"name": policy}, "constants": {"rates": slow}}
    async with fleet(*scripts, **settings) as (routed, requests, _):
        for count, name in enumerate(("one", "two")):
            requests.send(name, tokens=LONG, stream=True)

            async def arrived(count: int = count) -> bool:
                return sum(len(script.arrived) for script in scripts) == count + 1

            await until(arrived)
        assert [len(script.arrived) for script in scripts] == [1, 1]
        yield routed, requests, scripts
        for script in scripts:
            script.gate.open(9)


async def until_sent(name: str, scripts: list[Prefills]) -> None:
    """Wait until a worker has received a request."""

    await until(lambda: any(name in script.arrived for script in scripts))


async def test_held_request_chooses_at_next_first_byte() -> None:
    async with busy_fleet() as (routed, requests, scripts):
        await requests.queued("held", tokens=LONG, stream=True)
        explained = await routed.call("/explain", {"path": PATH, "request": {"model": MODEL, "prompt": [1, 2, 3]}})
        assert explained.json()["held"] == "late_binding"
        scripts[1].gate.open()
        await until_arrived(scripts[1], 2)
        assert scripts[1].arrived[1] == "held"
        assert await routed.metric("kvrouter_admission_wait_seconds_count", reason="late_binding") == 1
        explained = await routed.call("/explain", {"path": PATH, "request": {"model": MODEL, "prompt": [1, 2, 3]}})
        assert explained.json()["held"] == "late_binding"  # it is busy again


async def test_shortest_held_request_is_sent_first() -> None:
    async with busy_fleet() as (_, requests, scripts):
        await requests.queued("long", tokens=3 * LONG, stream=True)
        await requests.queued("short", tokens=LONG, stream=True)
        scripts[0].gate.open()
        await until_arrived(scripts[0], 2)
        assert scripts[0].arrived == [scripts[0].arrived[0], "short"]


async def test_held_request_with_least_slack_is_sent_first() -> None:
    async with busy_fleet() as (_, requests, scripts):
        await requests.queued("patient", {"x-slo-ttft-ms": "900000"}, tokens=LONG, stream=True)
        await requests.queued("urgent", {"x-slo-ttft-ms": "600000"}, tokens=LONG, stream=True)
        scripts[0].gate.open()
        await until_arrived(scripts[0], 2)
        assert scripts[0].arrived == [scripts[0].arrived[0], "urgent"]


async def test_request_held_until_timeout_is_sent_to_its_choice() -> None:
    async with busy_fleet(timeout=0.2) as (_, requests, scripts):
        requests.send("held", tokens=LONG, stream=True)
        await until_sent("held", scripts)


async def test_held_request_with_missed_slo_is_sent_last() -> None:
    async with busy_fleet(timeout=0.2) as (_, requests, scripts):
        arrived = scripts[0].arrived = scripts[1].arrived = list[str]()
        await requests.queued("late", {"x-slo-ttft-ms": "1"}, tokens=LONG, stream=True)
        requests.send("held", tokens=LONG, stream=True)
        await until_arrived(scripts[0], 2)
        assert arrived == ["held", "late"]


@pytest.mark.derives
async def test_choices_of_late_requests_per_event_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The late requests prefer the busy worker with their prefix to the idle one."""
    chose: list[SLO] = []
    select = SLOSelector.select

    def counting(selector: SLOSelector, found: Any, usual: Selection, prompt: Any, slo: SLO, now: float) -> Selection:
        chose.append(slo)
        return select(selector, found, usual, prompt, slo, now)

    monkeypatch.setattr(SLOSelector, "select", counting)
    known = list(range(4 * LONG))
    async with busy_fleet() as (routed, requests, scripts):
        for script in scripts:
            script.gate.open()
        await routed.until_released()
        requests.send("known", prompt=known, stream=True)
        await until_sent("known", scripts)
        there, elsewhere = sorted(scripts, key=lambda script: "known" not in script.arrived)
        there.gate.open()
        await requests.reply("known")
        requests.send("three", tokens=LONG, stream=True)
        requests.send("four", tokens=LONG, stream=True)
        await until_arrived(there, 3)
        await until_arrived(elsewhere, 2)
        for number in range(6):
            await requests.queued(f"late {number}", {"x-slo-ttft-ms": "1"}, prompt=[*known, number], stream=True)
        elsewhere.gate.open()
        await requests.reply(elsewhere.arrived[-1])  # now it is known that they are late
        chose.clear()
        for count, name in enumerate(("five", "six"), start=1):
            requests.send(name, tokens=LONG, stream=True)
            await until_arrived(elsewhere, 2 + count)
            elsewhere.gate.open()
            await requests.reply(name)
            assert 2 * count <= len(chose) <= 4 * count  # at the first byte and at the end of a response
        assert len(set(map(id, chose))) >= 4  # each in its turn
        assert await routed.queued() == 6


async def test_full_queue_drops_late_requests_first() -> None:
    async with busy_fleet(queue=1) as (routed, requests, scripts):
        await requests.queued("late", {"x-slo-ttft-ms": "1"}, tokens=LONG, stream=True)
        requests.send("held", tokens=LONG, stream=True)
        refused = await requests.reply("late")
        assert (refused.status, refused.error["code"]) == (429, "queue_full")
        await routed.until_queued(1)
        requests.send("too late", {"x-slo-ttft-ms": "1"}, tokens=LONG, stream=True)
        assert (await requests.reply("too late")).status == 429
        assert await routed.metric("kvrouter_slo_answers_total", outcome="refused") == 2
        assert [len(script.arrived) for script in scripts] == [1, 1]
        scripts[0].gate.open()
        await until_arrived(scripts[0], 2)
        assert scripts[0].arrived[1] == "held"


@pytest.mark.parametrize("policy", ["kv_aware", "least_loaded"])
async def test_without_limits_late_binding_is_optional_and_only_for_kv_aware(policy: str) -> None:
    async with busy_fleet(policy, late_binding=policy != "kv_aware", requests=None) as (_, requests, scripts):
        requests.send("third", tokens=LONG, stream=True)
        await until_sent("third", scripts)


@pytest.mark.parametrize("stream", [True, False])
async def test_requests_are_not_held_without_choice_or_streams(stream: bool) -> None:
    """Requests are not held for one worker without limits, nor behind responses whose prefill has no visible end."""
    gate = Gate()
    admission = {"requests": None} if stream else {}
    async with fleet(*[gate] * (1 if stream else 2), admission=admission) as (_, requests, _):
        for number in range(6):
            requests.send(f"{number}", tokens=LONG, stream=stream)
        await until_arrived(gate, 6)
        gate.open(6)


# Deadlines


async def test_waiting_request_is_refused_at_its_deadline() -> None:
    gate = Gate()
    async with one_worker(gate, ONE_AT_A_TIME) as (routed, requests):
        for name, header in (("own", {"x-request-timeout": "0.1"}), ("client's", {"x-stainless-read-timeout": "0.1"})):
            requests.send(name, header)
            reply = await requests.reply(name)
            assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        assert await routed.metric("kvrouter_admission_refused_total", reason="deadline") == 2
        gate.open()
        await requests.reply("first")
        assert gate.arrived == ["first"]


async def test_response_is_cut_off_at_deadline() -> None:
    left = asyncio.Event()

    async def never(exchange: Exchange) -> None:
        await exchange.until_closed()
        left.set()

    async with scripted_worker(never) as worker, router(worker.url) as routed:
        body = {"model": MODEL, "prompt": "x"}
        reply = await routed.call(PATH, body, headers={"x-request-timeout": "0.2"})
        assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")
        await asyncio.wait_for(left.wait(), 60)
        await routed.until_released()
        assert (await routed.workers())[0]["state"] == "ready"


async def test_stream_ends_with_error_event_at_deadline() -> None:
    async def endless(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.until_closed()

    async with scripted_worker(endless) as worker, router(worker.url) as routed:
        body = {"model": MODEL, "prompt": "x", "stream": True}
        reply = await routed.call(PATH, body, headers={"x-envoy-expected-rq-timeout-ms": "200"})
        assert reply.status == 200
        first, last = (line for line in reply.body.split(b"\n\n") if line)
        assert first == b"data: 1"
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "deadline_exceeded"
        await routed.until_released()


async def test_read_timeout_of_client_is_no_deadline() -> None:
    gate = Gate()
    async with fleet(gate) as (_, requests, _):
        requests.send("slow", {"x-stainless-read-timeout": "0.1"})
        await until_arrived(gate, 1)
        await asyncio.sleep(0.2)
        gate.open()
        assert (await requests.reply("slow")).status == 200


async def test_unreadable_headers_are_refused_by_name() -> None:
    async with scripted_worker() as worker, router(worker.url) as routed:
        for name in ("x-request-timeout", "x-kvrouter-priority"):
            reply = await routed.call(PATH, {"model": MODEL, "prompt": "x"}, headers={name: "soon"})
            assert (reply.status, reply.error["param"]) == (400, name)
        assert worker.exchanges == []
