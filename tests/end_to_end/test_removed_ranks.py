"""Workers that start again with other DP ranks: no request fails because its rank was removed."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from router_under_test import RouterUnderTest, router
from scripted_worker import Exchange, Script, ScriptedWorker, scripted_worker
from simulated_workers import simulated_workers

from benchmarks.ports import free_port
from kvrouter.processes import KvrouterProcess

BODY = {"model": "simulated", "prompt": "x", "max_tokens": 1}
# Periodic probes are rarer than a test lasts.
RARE = {"probe_interval": 60.0, "probe_timeout": 5.0, "stall_seconds": 30.0, "slow_start": 0.0}
COLD = {"cold_start_timeout": 25.0}


def sources(ranks: int) -> bytes:
    """The answer of a worker to `/kv_event_sources`. Its streams cannot be reached."""
    return json.dumps({str(rank): {"endpoint": f"tcp://*:{rank + 1}"} for rank in range(ranks)}).encode()


@asynccontextmanager
async def two_ranks(script: Script) -> AsyncIterator[tuple[ScriptedWorker, RouterUnderTest]]:
    async with scripted_worker(script) as worker:
        worker.sources = sources(2)
        async with router(worker.url, fleet=RARE) as routed:
            assert await ranks(routed) == 2
            yield worker, routed


async def ranks(routed: RouterUnderTest) -> int:
    return sum(len(worker["ranks"]) for worker in await routed.workers())


@pytest.mark.parametrize("others", [0, 1])
async def test_no_request_fails_when_a_worker_starts_again_with_fewer_ranks(others: int) -> None:
    arguments = ["simulate", "--port", str(free_port()), "--dp-size"]
    with KvrouterProcess([*arguments, "4"]) as before:
        url = await asyncio.to_thread(before.wait_until_listening)
        async with (
            simulated_workers(others) as urls,
            router(url, *urls, fleet=RARE, policy={"name": "round_robin"}, admission=COLD) as routed,
        ):
            assert await ranks(routed) == 4 + others
            for _ in range(8):
                assert (await routed.call("/v1/completions", BODY)).status == 200
            before.send_signal(signal.SIGKILL)
            await asyncio.to_thread(before.__exit__, None, None, None)
            with KvrouterProcess([*arguments, "2"]) as after:
                await asyncio.to_thread(after.wait_until_listening)

                async def sends() -> list[int]:
                    return [(await routed.call("/v1/completions", BODY)).status for _ in range(30)]

                assert {*await sends(), *await sends()} <= {200}
                assert await ranks(routed) == 2 + others


@pytest.mark.parametrize("split", [False, True])
async def test_a_request_to_a_rank_that_was_removed_is_sent_again(split: bool) -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.header("x-data-parallel-rank") in ([b"0"], []):
            await exchange.answer(b"{}")
            return
        error = b'{"error": {"message": "data_parallel_rank 1 is out of range", "code": 400}}'
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n" % len(error)
        await exchange.send(head)
        if split:
            await asyncio.sleep(0.1)
        await exchange.send(error)

    async with two_ranks(script) as (worker, routed):
        worker.sources = sources(1)
        replies = [await routed.call("/v1/completions", BODY | {"model": "m"}) for _ in range(4)]
        assert [reply.status for reply in replies] == [200] * 4
        assert await ranks(routed) == 1


async def test_an_error_about_ranks_that_are_there_is_forwarded() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b'{"error": "rank_of_lora is wrong"}', status="400 Bad Request")

    async with two_ranks(script) as (worker, routed):
        reply = await routed.call("/v1/completions", BODY | {"model": "m"})
        assert (reply.status, reply.body) == (400, b'{"error": "rank_of_lora is wrong"}')
        assert len(worker.exchanges) == 1
        await routed.until_released()
