"""Workers whose streams have no replay: after a restart they hold nothing until they report it."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import pytest
import zmq
from router_under_test import RouterUnderTest, router, until
from scripted_worker import scripted_worker

from benchmarks.ports import free_port
from kvevents import BlockStored, EventBatch, encode_batch
from kvevents.frames import live_frames
from kvrouter.processes import KvrouterProcess

PROMPT = {"model": "simulated", "prompt": " ".join(map(str, range(200))), "max_tokens": 1}
FLEET = {"probe_interval": 0.2, "retry_interval": 0.1, "metrics_interval": 0.1, "stall_seconds": 30.0}
COLD = {"cold_start_timeout": 25.0}


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

                await until(empty, seconds=20)
                await until(reported, seconds=20)
    finally:
        publisher.close(0)
        context.term()
