"""Workers that start again with fewer ranks, without a replay of their events, or with another model."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import zmq
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, Script, ScriptedWorker, scripted_worker
from simulated_workers import simulated_workers

from benchmarks.ports import free_port
from kvevents import BlockStored, EventBatch, encode_batch
from kvevents.frames import live_frames
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
        async with router(worker.url, fleet=RARE, policy={"name": "round_robin"}) as routed:
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
                await until(lambda: ranks(routed), lambda count: count == 2 + others)


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
        for prompt in "ab":
            assert (await routed.call("/v1/completions", BODY | {"model": "m", "prompt": prompt})).status == 200
        await until(lambda: ranks(routed), lambda count: count == 1)


async def test_an_error_about_ranks_that_are_there_is_forwarded() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.answer(b'{"error": "rank_of_lora is wrong"}', status="400 Bad Request")

    async with two_ranks(script) as (worker, routed):
        reply = await routed.call("/v1/completions", BODY | {"model": "m"})
        assert (reply.status, reply.body) == (400, b'{"error": "rank_of_lora is wrong"}')
        assert len(worker.exchanges) == 1
        await routed.until_released()


PROMPT = {"model": "simulated", "prompt": " ".join(map(str, range(200))), "max_tokens": 1}
FLEET = {"probe_interval": 0.2, "metrics_interval": 0.1, "stall_seconds": 30.0}


async def blocks(routed: RouterUnderTest) -> float:
    return await routed.metric("kvrouter_index_blocks", tier="gpu")


async def has_blocks(routed: RouterUnderTest) -> bool:
    return await blocks(routed) > 0


async def test_a_new_process_holds_nothing_of_the_former_one() -> None:
    events = {"publisher": "zmq", "endpoint": f"tcp://127.0.0.1:{free_port()}", "replay_endpoint": None}
    arguments = ["simulate", "--port", str(free_port()), "--kv-events", json.dumps(events)]
    with KvrouterProcess(arguments) as before:
        url = await asyncio.to_thread(before.wait_until_listening)
        async with router(url, fleet=FLEET, admission=COLD) as routed:
            await routed.call("/v1/completions", PROMPT)
            await until(lambda: has_blocks(routed))
            assert (await routed.call("/v1/completions", PROMPT)).overlap > 100
            before.send_signal(signal.SIGKILL)
            await asyncio.to_thread(before.__exit__, None, None, None)
            with KvrouterProcess(arguments) as after:
                await asyncio.to_thread(after.wait_until_listening)
                await until(lambda: blocks(routed), lambda held: held == 0)
                reply = await routed.call("/v1/completions", PROMPT)
                assert (reply.overlap, reply.cached) == (0, 0)
                # The first events are missed, because the stream was not connected again yet.
                other = PROMPT | {"prompt": " ".join(map(str, range(500, 700)))}

                async def reported() -> bool:
                    other["prompt"] = f"another {other['prompt']}"
                    return (await routed.call("/v1/completions", other)).status == 200 and await has_blocks(routed)

                await until(reported)
                reply = await routed.call("/v1/completions", other)
                assert reply.overlap == reply.cached > 100


@pytest.mark.parametrize("sign", ["refused", "counters", "start time"])
async def test_a_process_that_is_new_by_any_sign_holds_nothing(sign: str) -> None:
    """The publisher stays, as behind a proxy of the stream."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    publisher = context.socket(zmq.PUB)
    port = publisher.bind_to_random_port("tcp://127.0.0.1")
    try:
        async with scripted_worker() as worker:
            worker.sources = json.dumps({"0": {"endpoint": f"tcp://127.0.0.1:{port}"}}).encode()
            worker.metrics = b"vllm:prompt_tokens_total 80.0\nprocess_start_time_seconds 100.0\n"
            async with router(worker.url, fleet=FLEET) as routed:
                seq = 0

                async def reported() -> bool:
                    nonlocal seq
                    event = BlockStored([seq], None, list(range(seq, seq + 16)), 16)
                    payload = encode_batch(EventBatch(time.time(), [event]))
                    publisher.send_multipart(live_frames(b"", seq, payload))
                    seq += 1
                    return await blocks(routed) > 0

                await until(reported)
                await asyncio.sleep(0.3)
                assert await blocks(routed) > 0
                if sign == "refused":
                    await worker.stop()
                    await routed.call("/v1/completions", {"model": "m", "prompt": "x"})
                    await worker.start()
                elif sign == "counters":
                    worker.metrics = b"vllm:prompt_tokens_total 10.0\nprocess_start_time_seconds 100.0\n"
                else:
                    worker.metrics = b"vllm:prompt_tokens_total 90.0\nprocess_start_time_seconds 200.0\n"

                async def empty() -> bool:
                    return await blocks(routed) == 0

                await until(empty)
                await until(reported)
    finally:
        publisher.close(0)
        context.term()


LONG = {"model": "m", "prompt": list(range(1, 400))}


@pytest.mark.parametrize("other", [{"root": "/models/b"}, {"max_model_len": 2048}])
async def test_changed_model_is_a_finding_and_drops_sent_prefixes(other: dict[str, Any]) -> None:
    card = {"id": "m", "root": "/models/a", "max_model_len": 8192}

    async def script(exchange: Exchange) -> None:
        if exchange.target == "/v1/models":
            await exchange.answer(json.dumps({"data": [card]}).encode())
        elif exchange.method == "GET" or exchange.target.endswith(("/render", "/tokenize")):
            await exchange.answer(status="404 Not Found")
        else:
            await exchange.answer(b'{"choices": [], "usage": {"prompt_tokens": 399, "completion_tokens": 1}}')

    async with scripted_worker(script) as worker:
        worker.answers_discovery = False
        async with router(worker.url) as routed:

            async def found() -> list[dict[str, Any]]:
                findings: list[dict[str, Any]] = await routed.findings()
                return [each for each in findings if each["finding"] == "model_changed"]

            await routed.call("/v1/completions", LONG)
            assert int((await routed.call("/v1/completions", LONG)).overlap or 0) > 300
            assert await found() == []
            card |= other

            await until(found)
            (finding,) = await found()
            assert (finding["worker"], finding["model"]) == (worker.url, "m")
            assert str(next(iter(other.values()))) in finding["detail"]
            assert int((await routed.call("/v1/completions", LONG)).overlap or 0) == 0
