"""Requests that meet the stopped last worker of their model wait for its return, like later requests."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from router_under_test import Reply, RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_worker

from benchmarks.ports import free_port
from kvrouter.processes import KvrouterProcess
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

BODY = {"model": "m", "prompt": "x", "max_tokens": 2}
# Probes are too rare to detect a stopped worker.
SELDOM = {"probe_interval": 60.0, "probe_timeout": 30.0, "stall_seconds": 30.0}
SOON = {"retry_interval": 0.1}
UNPROBED: dict[str, Any] = {"fleet": SELDOM, "constants": SOON}
COLD = {"cold_start_timeout": 60.0}

Gone = Callable[[RouterUnderTest, ScriptedWorker], Awaitable["asyncio.Task[Reply]"]]


async def asked(routed: RouterUnderTest) -> asyncio.Task[Reply]:
    return asyncio.create_task(routed.call("/v1/completions", BODY))


async def waiting(routed: RouterUnderTest) -> int:
    return sum((await routed.call("/health")).json()["queue"].values())


async def until_waiting(routed: RouterUnderTest, requests: int = 1) -> None:
    async def reached() -> bool:
        return await waiting(routed) == requests

    await until(reached)


async def refused(routed: RouterUnderTest, worker: ScriptedWorker) -> asyncio.Task[Reply]:
    await worker.stop()
    return await asked(routed)


async def kept_connection_closed(routed: RouterUnderTest, worker: ScriptedWorker) -> asyncio.Task[Reply]:
    assert (await routed.call("/v1/completions", BODY)).status == 200
    return await refused(routed, worker)


async def killed_over_the_request(routed: RouterUnderTest, worker: ScriptedWorker) -> asyncio.Task[Reply]:
    worker.script = hang
    before = len(worker.exchanges)
    request = await asked(routed)
    await received(worker, before + 1)
    await worker.stop()
    return request


async def reset_at_connect(routed: RouterUnderTest, worker: ScriptedWorker) -> asyncio.Task[Reply]:
    worker.answers_discovery, worker.script = False, Exchange.hang_up
    request = await asked(routed)
    await until_waiting(routed)
    return request


async def removed_and_gone(routed: RouterUnderTest, worker: ScriptedWorker) -> asyncio.Task[Reply]:
    request = asyncio.create_task(killed_over_the_request(routed, worker))
    await received(worker, 1)
    assert (await routed.call(f"/workers?url={worker.url}", method="DELETE")).status == 200
    return await request


async def ejected(routed: RouterUnderTest, worker: ScriptedWorker) -> asyncio.Task[Reply]:
    worker.script = fail
    for _ in range(3):
        assert (await routed.call("/v1/completions", BODY)).status == 500
    assert [each["state"] for each in await routed.workers()] == ["ejected"]
    return await refused(routed, worker)


async def hang(_: Exchange) -> None:
    await asyncio.sleep(60)


async def fail(exchange: Exchange) -> None:
    await exchange.answer(b"{}", status="500 Internal Server Error")


async def received(worker: ScriptedWorker, requests: int) -> None:
    async def seen() -> bool:
        return len(worker.exchanges) >= requests

    await until(seen)


async def come_back(routed: RouterUnderTest, worker: ScriptedWorker) -> None:
    await worker.stop()
    worker.answers_discovery, worker.script = True, Exchange.answer
    await worker.start()
    if not await routed.workers():
        await routed.call("/workers", {"url": worker.url})


@pytest.mark.parametrize(
    "gone",
    [refused, kept_connection_closed, killed_over_the_request, reset_at_connect, removed_and_gone, ejected],
)
async def test_request_is_held_if_last_worker_stopped(gone: Gone) -> None:
    async with scripted_worker() as worker, router(**UNPROBED, admission=COLD) as routed:
        await routed.call("/workers", {"url": worker.url})

        async def up() -> bool:
            return [each["state"] for each in await routed.workers()] in (["ready"], ["warming"])

        await until(up)
        first = await gone(routed, worker)
        await until_waiting(routed)
        later = await asked(routed)
        await until_waiting(routed, 2)
        await come_back(routed, worker)
        assert [(await each).status for each in (first, later)] == [200, 200]
        await routed.until_released()


async def test_requests_on_a_removed_worker_that_hangs_are_answered_by_another() -> None:
    fleet = {"stall_seconds": 0.3, "metrics_interval": 0.1, "slow_start": 0.0}
    async with (
        scripted_worker(hang) as leaving,
        scripted_worker() as staying,
        router(staying.url, fleet=fleet, constants=SOON, policy={"name": "round_robin"}) as routed,
    ):
        await routed.call("/workers", {"url": leaving.url})

        async def both_up() -> bool:
            return all(each["state"] == "ready" for each in await routed.workers())

        await until(both_up)
        requests = [await asked(routed) for _ in range(8)]
        await received(leaving, 3)
        leaving.answers_discovery = False
        assert (await routed.call(f"/workers?url={leaving.url}", method="DELETE")).status == 200
        async with asyncio.timeout(60):
            assert {(await each).status for each in requests} == {200}


async def test_requests_on_a_worker_that_hangs_move_to_one_that_came_after_them() -> None:
    fleet = {"stall_seconds": 0.3, "metrics_interval": 0.1, "slow_start": 0.0}
    async with (
        scripted_worker(hang) as leaving,
        scripted_worker() as replacement,
        router(leaving.url, fleet=fleet, constants=SOON) as routed,
    ):
        requests = [await asked(routed) for _ in range(4)]
        await received(leaving, 4)
        leaving.answers_discovery = False
        await routed.call("/workers", {"url": replacement.url})
        async with asyncio.timeout(60):
            assert {(await each).status for each in requests} == {200}


async def test_request_is_held_if_last_prefill_worker_stopped() -> None:
    async with scripted_worker() as prefill, scripted_worker() as decode:
        pair = [{"url": prefill.url, "role": "prefill"}, {"url": decode.url, "role": "decode"}]
        sections = {"workers": pair, "disaggregation": {"backend": "sglang"}, "admission": COLD, **UNPROBED}
        async with router(**sections) as routed:
            assert (await routed.call("/v1/completions", BODY)).status == 200
            decode.script = hang  # until the prefill is there
            await prefill.stop()
            first = await asked(routed)
            await until_waiting(routed)
            later = await asked(routed)
            await until_waiting(routed, 2)
            decode.script = Exchange.answer
            await prefill.start()
            assert [(await each).status for each in (first, later)] == [200, 200]
            await routed.until_released()


async def test_request_is_retried_on_restarted_worker() -> None:
    async with scripted_worker(hang) as first, scripted_worker(hang) as second:
        fleet = SELDOM | {"slow_start": 0.0}
        async with router(first.url, second.url, fleet=fleet, constants=SOON, admission=COLD) as routed:
            await first.stop()
            requests = [await asked(routed) for _ in range(2)]  # one of them is refused first
            await received(second, 2)
            await come_back(routed, first)

            async def both_up() -> bool:
                return all(each["state"] == "ready" for each in await routed.workers())

            await until(both_up)
            await second.stop()
            assert [(await each).status for each in requests] == [200, 200]


async def test_queued_request_is_held_if_last_worker_ends() -> None:
    admission = COLD | {"requests": 1, "timeout": 0.5, "late_binding": False}
    async with scripted_worker(hang) as worker, router(worker.url, **UNPROBED, admission=admission) as routed:
        first = await asked(routed)
        await received(worker, 1)
        queued = await asked(routed)
        await until_waiting(routed)
        await worker.stop()
        await asyncio.sleep(1.0)
        assert not first.done()
        assert not queued.done()
        await come_back(routed, worker)
        assert [(await each).status for each in (first, queued)] == [200, 200]


async def test_repeatedly_refused_request_waits_no_longer_than_others() -> None:
    admission = {"cold_start_timeout": 0.6}
    async with scripted_worker() as worker, router(worker.url, **UNPROBED, admission=admission) as routed:
        worker.answers_discovery, worker.script = False, Exchange.hang_up
        began = asyncio.get_running_loop().time()
        reply = await routed.call("/v1/completions", BODY)
        assert (reply.status, reply.error["code"]) == (503, "no_worker_available")
        assert 0.5 < asyncio.get_running_loop().time() - began < 30


async def test_killed_and_restarted_processes_lose_no_request() -> None:
    arguments: list[list[str]] = [["simulate", "--port", str(free_port())] for _ in range(2)]
    body: dict[str, Any] = BODY | {"model": "simulated", "max_tokens": 20}
    fleet = SELDOM | {"slow_start": 0.0}
    with KvrouterProcess(arguments[0]) as one, KvrouterProcess(arguments[1]) as other:
        urls = [await asyncio.to_thread(each.wait_until_listening) for each in (one, other)]
        async with router(*urls, fleet=fleet, constants=SOON, admission=COLD) as routed:
            replies: list[asyncio.Task[Reply]] = []
            for number in range(40):
                if number == 20:
                    await asyncio.gather(*replies)  # an answer that both workers break off is lost
                    for killed in (one, other):
                        killed.send_signal(signal.SIGKILL)
                        await asyncio.to_thread(killed.wait, 60)
                replies.append(asyncio.create_task(routed.call("/v1/completions", body)))
                await asyncio.sleep(0.01)
            await asyncio.to_thread(one.__exit__, None, None, None)
            with KvrouterProcess(arguments[0]) as again:
                await asyncio.to_thread(again.wait_until_listening)
                assert [(await each).status for each in replies] == [200] * 40


REQUEST = {"model": "simulated", "prompt": "x", "max_tokens": 2}
MODELS = {"simulated": {"aliases": ["small"]}}


def cold(seconds: float = 20, **more: Any) -> dict[str, Any]:
    return {"models": MODELS, "admission": {"cold_start_timeout": seconds, **more}}


async def demand(routed: RouterUnderTest) -> float:
    return await routed.metric("kvrouter_model_demand", model="simulated")


async def test_requests_wait_for_first_worker_of_model() -> None:
    async with router(**cold()) as routed:
        await until(lambda: routed.call("/ready"), lambda reply: reply.status == 200)
        assert await demand(routed) == 0
        models = ("simulated", "small", "simulated")
        waiting = [asyncio.create_task(routed.call("/v1/completions", REQUEST | {"model": each})) for each in models]

        await until(lambda: demand(routed), lambda found: found == len(models))
        assert (await routed.health())["queue"] == {"no_worker": len(models)}
        async with running(SimulatedWorkerSettings()) as url:
            assert (await routed.call("/workers", {"url": url})).status == 201
            assert {reply.status for reply in await asyncio.gather(*waiting)} == {200}
            await routed.until_released()
            assert await demand(routed) == 0
            assert await routed.metric("kvrouter_admission_wait_seconds_count", reason="no_worker") == len(models)


async def test_request_waits_for_model_whose_workers_were_removed() -> None:
    async with router(admission={"cold_start_timeout": 20}) as routed:
        async with running(SimulatedWorkerSettings()) as url:
            await routed.call("/workers", {"url": url})

            await until(lambda: routed.call("/v1/completions", REQUEST), lambda reply: reply.status == 200)
        await routed.call(f"/workers?url={url}", method="DELETE")
        waiting = asyncio.create_task(routed.call("/v1/completions", REQUEST))

        await until(lambda: demand(routed), lambda found: found == 1)
        async with running(SimulatedWorkerSettings()) as url:
            await routed.call("/workers", {"url": url})
            assert (await waiting).status == 200


async def test_unknown_model_is_refused_at_once() -> None:
    async with router(**cold()) as routed:
        reply = await routed.call("/v1/completions", REQUEST | {"model": "made up"})
        assert reply.status == 503
        assert await routed.metric("kvrouter_requests_refused_total", status="503") == 1
        assert "made up" not in (await routed.call("/metrics")).body.decode()


async def test_cold_start_wait_times_out() -> None:
    async with router(**cold(0.2)) as routed:
        reply = await routed.call("/v1/completions", REQUEST)
        assert (reply.status, reply.error["code"]) == (503, "no_worker_available")
        assert await routed.metric("kvrouter_admission_refused_total", reason="no_worker") == 1
        deadline = await routed.call("/v1/completions", REQUEST, headers={"x-request-timeout": "0.05"})
        assert deadline.status == 504


async def test_number_of_cold_start_waits_is_bounded() -> None:
    async with router(**cold(queue=4)) as routed:
        waiting = [asyncio.create_task(routed.call("/v1/completions", REQUEST)) for _ in range(2)]

        await until(lambda: demand(routed), lambda found: found == 2)
        assert (await routed.call("/v1/completions", REQUEST)).status == 503
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

        await until(lambda: demand(routed), lambda found: found == 0)


async def test_requests_are_refused_at_once_without_cold_start_timeout() -> None:
    async with router(models=MODELS) as routed:
        assert (await routed.call("/ready")).status == 503
        assert (await routed.call("/v1/completions", REQUEST)).status == 503
