"""Workers that fail, hang and come back, as clients see it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from itertools import cycle

import pytest
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, Script, ScriptedWorker, scripted_worker

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY = b'{"model": "m", "prompt": "x", "max_tokens": 1, "stream": true}'
TURNS = {"policy": {"name": "round_robin"}}
QUICK_STALL = {"probe_interval": 0.2, "retry_interval": 0.1, "metrics_interval": 0.1, "stall_seconds": 0.3}


async def stream(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    await exchange.chunk(b"data: 1\n\n")
    await exchange.chunk(b"")


async def head_then_hang_up(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    await exchange.hang_up()


async def head_then_nothing(exchange: Exchange) -> None:
    await exchange.begin_chunks()
    await exchange.left()


async def overloaded(exchange: Exchange) -> None:
    await exchange.answer(b"too much", "503 Service Unavailable")


async def broken(exchange: Exchange) -> None:
    await exchange.answer(b"a bug", "500 Internal Server Error")


async def state(routed: RouterUnderTest, worker: ScriptedWorker) -> str:
    return next(str(known["state"]) for known in await routed.workers() if known["worker"] == worker.url)


async def test_a_stream_that_never_got_beyond_its_head_goes_elsewhere() -> None:
    async with (
        scripted_worker(head_then_hang_up) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS) as routed,
    ):
        reply = await routed.call(PATH, BODY)
        assert (reply.status, reply.worker, reply.body) == (200, good.url, b"data: 1\n\n")
        assert reply.headers["x-kvrouter-attempts"] == "2"
        await routed.until_released()


async def test_an_overloaded_worker_is_passed_over_and_left_out_when_it_goes_on() -> None:
    async with (
        scripted_worker(overloaded) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS, fleet={"backoff": 30}) as routed,
    ):
        replies = [await routed.call(PATH, BODY) for _ in range(8)]
        assert {(reply.status, reply.worker) for reply in replies} == {(200, good.url)}
        assert len(bad.exchanges) == 3
        assert await state(routed, bad) == "left_out"


async def test_the_only_worker_says_itself_that_it_is_overloaded() -> None:
    async with scripted_worker(overloaded) as worker, router(worker.url) as routed:
        for _ in range(6):  # it goes on being asked
            reply = await routed.call(PATH, BODY)
            assert (reply.status, reply.body) == (503, b"too much")


async def test_an_error_of_the_worker_is_passed_on_and_counts_against_it() -> None:
    async with (
        scripted_worker(broken) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS, fleet={"backoff": 30}) as routed,
    ):
        statuses = Counter([(await routed.call(PATH, BODY)).status for _ in range(12)])
        assert statuses == {500: 3, 200: 9}


async def test_a_worker_that_recovers_is_used_again() -> None:
    async with (
        scripted_worker(broken) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS, fleet={"backoff": 0.1}) as routed,
    ):
        while await state(routed, bad) != "left_out":
            await routed.call(PATH, BODY)
        bad.script = stream

        async def used() -> bool:
            return (await routed.call(PATH, BODY)).worker == bad.url

        await until(used)
        assert await state(routed, bad) == "ready"


@pytest.mark.parametrize("hang", [Exchange.left, head_then_nothing])
async def test_a_worker_that_hangs_is_left_out_and_what_waits_goes_elsewhere(hang: object) -> None:
    async with (
        scripted_worker(stream) as hung,
        scripted_worker(stream) as one,
        scripted_worker(stream) as two,
        router(hung.url, one.url, two.url, **TURNS, fleet=QUICK_STALL | {"backoff": 30}) as routed,
    ):
        for _ in range(6):
            await routed.call(PATH, BODY)
        hung.script = hang  # type: ignore[assignment]
        began = time.monotonic()
        replies = await asyncio.gather(*(routed.call(PATH, BODY) for _ in range(12)))
        assert time.monotonic() - began < 20  # less than the worker is left alone
        assert {reply.status for reply in replies} == {200}
        assert hung.url not in {reply.worker for reply in replies}
        assert await state(routed, hung) == "left_out"
        await routed.until_released()


async def test_the_last_worker_is_never_left_out() -> None:
    finish = asyncio.Event()

    async def late(exchange: Exchange) -> None:
        await finish.wait()
        await stream(exchange)

    async with scripted_worker(stream) as worker, router(worker.url, fleet=QUICK_STALL) as routed:
        await routed.call(PATH, BODY)
        worker.script = late
        waiting = asyncio.create_task(routed.call(PATH, BODY))
        await asyncio.sleep(1.2)  # four times the silence that makes a worker hung
        assert await state(routed, worker) == "ready"
        finish.set()
        assert (await waiting).status == 200


async def test_a_request_that_hangs_its_workers_is_moved_once() -> None:
    async def hang(exchange: Exchange) -> None:
        await exchange.left()

    async with (
        scripted_worker(stream) as one,
        scripted_worker(stream) as two,
        scripted_worker(stream) as three,
        router(one.url, two.url, three.url, **TURNS, fleet=QUICK_STALL, proxy={"idle_timeout": 2}) as routed,
    ):
        for _ in range(6):
            await routed.call(PATH, BODY)
        workers = (one, two, three)
        for worker in workers:
            worker.script = hang
        before = sum(len(worker.exchanges) for worker in workers)
        assert (await routed.call(PATH, BODY)).status == 504
        assert sum(len(worker.exchanges) for worker in workers) - before == 2


async def test_retries_end_with_their_budget() -> None:
    async with (
        scripted_worker(overloaded) as bad,
        scripted_worker(stream) as good,
        router(bad.url, good.url, **TURNS, proxy={"retry_minimum": 1, "retry_share": 0}) as routed,
    ):
        assert (await routed.call(PATH, BODY)).status == 200

        async def refused() -> bool:
            return (await routed.call(PATH, BODY)).status == 503

        await until(refused)


async def test_the_requests_of_others_count_as_load() -> None:
    metrics = b'vllm:num_requests_running{engine="0"} 7.0\n'
    async with (
        scripted_worker(stream) as busy,
        scripted_worker(stream) as idle,
        router(busy.url, idle.url, policy={"name": "least_loaded"}, fleet={"metrics_interval": 0.1}) as routed,
    ):
        busy.metrics = metrics

        async def known() -> bool:
            return await routed.metric("kvrouter_requests_of_others", worker=busy.url) == 7

        await until(known)
        assert {(await routed.call(PATH, BODY)).worker for _ in range(8)} == {idle.url}


async def test_a_restarted_worker_begins_slowly() -> None:
    async with scripted_worker(stream) as worker, router(worker.url, fleet={"retry_interval": 0.1}) as routed:
        assert await state(routed, worker) == "ready"
        await worker.stop()
        await routed.call(PATH, BODY)

        async def down() -> bool:
            return await routed.metric("kvrouter_worker_state", worker=worker.url, state="down") == 1

        await until(down)
        await asyncio.sleep(0.3)  # for a probe to fail
        await worker.start()

        async def warming() -> bool:
            return await state(routed, worker) == "warming"

        await until(warming)


async def test_a_rank_that_hangs_is_left_out_alone() -> None:
    """The worker has nobody to give its requests to: they stay, and new ones go to its other rank."""

    async def one_rank_hangs(exchange: Exchange) -> None:
        await (Exchange.left if exchange.header("x-data-parallel-rank") == [b"1"] else stream)(exchange)

    async with scripted_worker(stream) as worker:
        streams = [{"dp_rank": rank, "endpoint": "tcp://127.0.0.1:1"} for rank in range(2)]
        ranked = {"url": worker.url, "streams": streams}
        async with router(workers=[ranked], **TURNS, fleet=QUICK_STALL | {"backoff": 30}) as routed:
            for _ in range(4):
                assert (await routed.call(PATH, BODY)).status == 200
            worker.script = one_rank_hangs
            stuck = asyncio.create_task(routed.call(PATH, BODY)), asyncio.create_task(routed.call(PATH, BODY))

            async def found() -> bool:
                findings = (await routed.call("/health")).json()["findings"]
                return any((each["finding"], each.get("dp_rank")) == ("rank_left_out", 1) for each in findings)

            await until(found)
            replies = [await routed.call(PATH, BODY) for _ in range(4)]
            assert {(reply.status, reply.headers["x-kvrouter-dp-rank"]) for reply in replies} == {(200, "0")}
            assert await state(routed, worker) == "ready"
            for task in stuck:
                task.cancel()
            await asyncio.gather(*stuck, return_exceptions=True)


turns = cycle((broken, stream))


async def fails_every_other(exchange: Exchange) -> None:
    await next(turns)(exchange)


async def slow(exchange: Exchange) -> None:
    await asyncio.sleep(0.8)
    await stream(exchange)


@pytest.mark.parametrize(
    ("script", "reason"), [(fails_every_other, "of its requests fail"), (slow, "first bytes take")]
)
async def test_a_worker_far_worse_than_the_others_is_left_out(script: Script, reason: str) -> None:
    async with AsyncExitStack() as stack:
        worse = await stack.enter_async_context(scripted_worker(script))
        others = [await stack.enter_async_context(scripted_worker(stream)) for _ in range(3)]
        urls = [worker.url for worker in (worse, *others)]
        routed = await stack.enter_async_context(router(*urls, **TURNS, fleet={"backoff": 30, "slow_start": 0}))

        async def left_out_after_more() -> bool:
            # Never three failures in a row: that would be another reason.
            await asyncio.gather(*(routed.call(PATH, BODY) for _ in range(16)))
            return await state(routed, worse) == "left_out"

        await until(left_out_after_more, 30)
        found = (await routed.call("/health")).json()["findings"]
        found = [finding for finding in found if finding["finding"] != "prompts_by_text"]
        assert [(each["finding"], each["worker"]) for each in found] == [("worker_left_out", worse.url)]
        assert reason in found[0]["detail"]
        replies = [await routed.call(PATH, BODY) for _ in range(8)]
        assert {(reply.status, reply.worker == worse.url) for reply in replies} == {(200, False)}
