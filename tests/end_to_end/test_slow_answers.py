"""Answers that are slow because they are long: their workers are neither ejected nor relieved of them.

The table has workers with and without engine metrics, with and without a response to scrapes, and outputs of 1 to
4,000 tokens. A generation never runs twice while its worker shows that it lives.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from enum import StrEnum

import pytest
from router_under_test import RouterUnderTest, router
from scripted_worker import Exchange, ScriptedWorker, scripted_worker

OUTPUTS = (1, 10, 100, 1000, 4000)
SECONDS_PER_TOKEN = 0.0015
FLEET = {"metrics_interval": 0.25, "stall_seconds": 1.0}


class Source(StrEnum):
    """A worker's answer to a scrape of its metrics."""

    NOTHING = "404"
    COUNTERS = "counters that rise"
    STILL = "counters that rise at the end of an answer"


def body(tokens: int | None, streamed: bool) -> dict[str, object]:
    limit = {} if tokens is None else {"max_tokens": tokens}
    return {"model": "m", "prompt": "x", "stream": streamed, "user": str(tokens), **limit}


def script_of(worker: ScriptedWorker, source: Source, outputs: list[int]) -> None:
    """Let a worker take the time of as many tokens as the test lists, request by request."""
    computed = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal computed
        tokens = outputs.pop(0)
        streamed = b'"stream": true' in exchange.body
        if streamed:
            await exchange.begin_chunks()
            await exchange.chunk(b"data: 1\n\n")
        for _ in range(10):
            await asyncio.sleep(tokens * SECONDS_PER_TOKEN / 10)
            if source is Source.COUNTERS:
                computed += 1
                worker.metrics = b"vllm:generation_tokens_total %d\n" % computed
        if source is Source.STILL:
            computed += 1
            worker.metrics = b"vllm:generation_tokens_total %d\n" % computed
        await (exchange.chunk(b"") if streamed else exchange.answer())

    worker.script = answer
    if source in (Source.COUNTERS, Source.STILL):
        worker.metrics = b"vllm:generation_tokens_total 0\n"


async def states(routed: RouterUnderTest) -> set[str]:
    return {str(each["state"]) for each in await routed.workers()}


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
async def test_long_outputs_eject_no_worker_and_are_computed_once(streamed: bool, limited: bool) -> None:
    async def row(source: Source) -> None:
        async with scripted_worker() as one, scripted_worker() as other:
            outputs = [33] * 40 + list(OUTPUTS)
            for worker in (one, other):
                script_of(worker, source, outputs)
            policy = {"name": "round_robin"}
            async with router(one.url, other.url, fleet=FLEET, policy=policy) as routed:
                usual = [routed.call("/v1/completions", body(33 if limited else None, streamed)) for _ in range(40)]
                assert {(await reply).status for reply in usual} == {200}
                seen: set[str] = set()
                long = [
                    asyncio.create_task(routed.call("/v1/completions", body(tokens if limited else None, streamed)))
                    for tokens in OUTPUTS
                ]
                while not all(task.done() for task in long):
                    seen |= await states(routed)
                    await asyncio.sleep(0.1)
                assert {task.result().status for task in long} == {200}
                assert "left_out" not in seen, source
                computed = [each for worker in (one, other) for each in worker.exchanges if each.method == "POST"]
                assert len(computed) == 40 + len(OUTPUTS), source

    await asyncio.gather(*(row(source) for source in (Source.NOTHING, Source.COUNTERS, Source.STILL)))


@pytest.mark.parametrize("scrapes", ["answered", "never answered", "no longer answered"])
async def test_a_worker_that_answers_probes_is_not_hung(scrapes: str) -> None:
    hold = asyncio.Event()

    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted_worker()) for _ in range(2)]
        for worker in workers:
            worker.silent_metrics = scrapes == "never answered"
        routed = await stack.enter_async_context(
            router(*[each.url for each in workers], fleet=FLEET, policy={"name": "round_robin"})
        )
        for _ in range(4):
            assert (await routed.call("/v1/completions", body(5, False))).status == 200
        before = sum(len(worker.exchanges) for worker in workers)

        async def late(exchange: Exchange) -> None:
            await hold.wait()
            await exchange.answer()

        for worker in workers:
            worker.script = late
            worker.silent_metrics = scrapes != "answered"
        request = asyncio.create_task(routed.call("/v1/completions", body(5, False)))
        await asyncio.sleep(4)
        assert await states(routed) <= {"ready", "warming"}
        assert sum(len(worker.exchanges) for worker in workers) == before + 1
        hold.set()
        assert (await request).status == 200


async def test_a_worker_that_answers_nothing_is_ejected_and_its_request_moved_once() -> None:
    async def hang(_: Exchange) -> None:
        await asyncio.sleep(60)

    async with (
        scripted_worker() as one,
        scripted_worker() as other,
        router(one.url, other.url, fleet=FLEET, policy={"name": "round_robin"}) as routed,
    ):
        for _ in range(10):
            assert (await routed.call("/v1/completions", body(4000, False))).status == 200
        one.script, one.answers_discovery = hang, False
        began = time.monotonic()
        replies = await asyncio.gather(*(routed.call("/v1/completions", body(4000, False)) for _ in range(2)))
        assert {(reply.status, reply.worker) for reply in replies} == {(200, other.url)}
        assert time.monotonic() - began < 6  # about 2 s on an idle machine
