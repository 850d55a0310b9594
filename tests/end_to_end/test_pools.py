"""A router in front of two workers on one shared pool, over real sockets: a recording of vLLM on a Mooncake Store."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from aiohttp import web
from router_under_test import RouterUnderTest, router, until
from running_app import running_app
from scripted_worker import Exchange, scripted_workers

from kvevents import BlockRemoved, BlockStored, Event, EventBatch, encode_batch
from kvevents.recording import read_recording

RECORDING = Path(__file__).parents[1] / "data" / "pools" / "vllm_mooncake_store_2workers"
MASTER = 2  # the source of the master's batches in the recording
BLOCK = 32


class PooledFleet:
    """Two workers and the master of their pool, which publish what a test sends.

    - `keys`: the keys in the pool.
    - `cached`: the cached tokens of the next answers.
    - `answering`: cleared while the master does not answer questions about keys.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.sockets = [context.socket(zmq.XPUB) for _ in range(3)]
        self.endpoints = [f"tcp://127.0.0.1:{each.bind_to_random_port('tcp://127.0.0.1')}" for each in self.sockets]
        self.urls: list[str] = []
        self.keys: set[str] = set()
        self.cached = 0
        self.answering = asyncio.Event()
        self.answering.set()
        self._losses = 0
        self._sent = [0, 0, 0]

    async def answer(self, exchange: Exchange) -> None:
        usage = {
            "prompt_tokens": len(json.loads(exchange.body)["prompt"]),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }
        await exchange.answer(json.dumps({"choices": [], "usage": usage}).encode())

    def master(self) -> web.Application:
        """Return the HTTP API of the master."""
        app = web.Application()

        async def metrics(_: web.Request) -> web.Response:
            return web.Response(text=f"master_evicted_key_count {self._losses}\nmaster_key_count 99999\n")

        async def all_keys(_: web.Request) -> web.Response:
            return web.Response(text="\n".join(self.keys))

        async def query_keys(request: web.Request) -> web.Response:
            await self.answering.wait()
            keys = request.query["keys"].split(",")
            return web.json_response({"success": True, "data": {key: {"ok": key in self.keys} for key in keys}})

        app.add_routes([web.get("/metrics", metrics), web.get("/get_all_keys", all_keys)])
        app.add_routes([web.get("/batch_query_keys", query_keys)])
        return app

    def send(self, source: int, frames: list[bytes]) -> None:
        """Publish a recorded batch."""
        self._sent[source] += 1
        self.sockets[source].send_multipart(frames)
        if source == MASTER:
            self.keys |= {event["object_key"] for event in msgspec.msgpack.decode(frames[2])[1]}

    def publish(self, source: int, *events: Event) -> None:
        """Publish a batch of a worker."""
        batch = encode_batch(EventBatch(0.0, list(events)))
        self.send(source, [b"", self._sent[source].to_bytes(8, "big"), batch])

    def store(self, key: str) -> None:
        """Publish an object of the pool."""
        event = {"event_type": "stored", "object_key": key, "medium": "cpu"}
        seq = (self._sent[MASTER] + 1).to_bytes(8, "big")
        self.send(MASTER, [b"", seq, msgspec.msgpack.encode([1000, [event], 0])])

    def lose(self, left: set[str]) -> None:
        """Lose all objects but some, which no event reports."""
        self.keys = left
        self._losses += 1

    async def until_received(self, routed: RouterUnderTest) -> None:
        """Wait until the router has received all that was published."""
        for worker, batches in zip(self.urls, self._sent[:MASTER], strict=True):
            await routed.until_metric(batches, "kvrouter_stream_batches_total", worker=worker)
        blocks = sum("@group:" in key for key in self.keys)
        await routed.until_metric(blocks, "kvrouter_pool_blocks", pool="store")

    async def until_known(self, routed: RouterUnderTest) -> None:
        """Wait until the router knows all that was published, and the content of the pool."""
        await self.until_received(routed)
        await routed.until_metric(1, "kvrouter_pool_known", pool="store")

    def publish_writer_and_holder(self) -> list[int]:
        """Publish a prompt that one worker wrote to the pool and evicted, and the other has on its device."""
        tokens = list(range(2 * BLOCK))
        blocks = BlockStored([7, 8], None, tokens, BLOCK, medium="GPU")
        copies = [BlockStored([name], None, [], BLOCK, medium="cpu") for name in (7, 8)]
        self.publish(0, blocks, *copies, BlockRemoved([7, 8], "GPU"))
        for name in (7, 8):
            self.store(object_key(name))
        self.publish(1, blocks)
        return [*tokens, 1]


def object_key(name: int) -> str:
    """Return the key of a block whose engine hash ends with a number."""
    return f"tiny@tp_rank:0@group:0@{'ab' * 24}{name:016x}"


@pytest.fixture
async def fleet() -> AsyncIterator[PooledFleet]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        fleet = PooledFleet(context)
        async with scripted_workers(fleet.answer, fleet.answer) as workers:
            fleet.urls = [worker.url for worker in workers]
            yield fleet
        for socket in fleet.sockets:
            socket.close(linger=0)


@pytest.fixture
async def routed(fleet: PooledFleet) -> AsyncIterator[RouterUnderTest]:
    async with router_of(fleet) as routed:
        yield routed


@asynccontextmanager
async def router_of(fleet: PooledFleet, **settings: Any) -> AsyncIterator[RouterUnderTest]:
    """Run a router with further settings of its pool."""
    async with AsyncExitStack() as stack:
        master = await stack.enter_async_context(running_app(fleet.master()))
        pool = {"name": "store", "type": "mooncake", "master": master, "events": fleet.endpoints[MASTER]}
        workers = [
            {"url": url, "block_size": BLOCK, "streams": [{"endpoint": endpoint}]}
            for url, endpoint in zip(fleet.urls, fleet.endpoints, strict=False)
        ]
        proxy = {"client_routing": True, "speculation_seconds": 0}
        routed = await stack.enter_async_context(
            router(
                workers=workers,
                pools=[pool | {"interval": 0.02} | settings],
                proxy=proxy,
                events={"catch_up_timeout": 0},
            )
        )
        for socket in fleet.sockets:
            await until(lambda socket=socket: socket.poll(0))  # the router's subscription
        yield routed


def predicted(headers: Any) -> int:
    """Return the predicted cached tokens of an answer, with those that are loaded."""
    return int(headers["x-kvrouter-overlap-tokens"]) + int(headers.get("x-kvrouter-loadable-tokens", 0))


async def test_answers_of_a_recording_are_predicted_by_devices_and_pool(
    fleet: PooledFleet, routed: RouterUnderTest
) -> None:
    records = list(read_recording(RECORDING.with_suffix(".kvrec")))
    with gzip.open(f"{RECORDING}.requests.jsonl.gz", "rt") as lines:
        steps = [json.loads(line) for line in lines]
    answers: list[tuple[int, int]] = []
    for step in sorted(steps, key=lambda step: step.get("t_start") or step["t"]):
        while records and records[0].received_at < (step.get("t_start") or step["t"]):
            record = records.pop(0)
            fleet.send(record.source, list(record.frames))
        if step["kind"] == "admin":
            if step["what"] == "pool keys" and step["n"] != len(fleet.keys):
                fleet.lose(set(step.get("keys", ())))
            continue
        await fleet.until_known(routed)
        fleet.cached = step["cached_tokens"]
        body = {"model": "m", "prompt": step["prompt_token_ids"]} | step["extra"]
        # Before its first event, a worker is predicted by the prompts that it was sent.
        for _ in range(3 if answers else 1):
            named = {"x-smg-target-worker": fleet.urls[step["worker"]]}
            reply = await routed.call("/v1/completions", body, headers=named)
            answers.append((predicted(reply.headers), step["cached_tokens"]))
    assert len(answers) == 1 + 3 * 29
    assert [answer for answer in answers if answer[0] != answer[1]] == []
    assert await routed.findings() == []
    assert await routed.metric("kvrouter_loadable_tokens_total") > 0


async def explained(routed: RouterUnderTest, prompt: list[int]) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Return the worker that a prompt would be sent to, and both candidates, the cheapest first."""
    asked = {"request": {"model": "m", "prompt": prompt}, "path": "/v1/completions"}
    answer = (await routed.call("/explain", asked)).json()
    return answer["choice"]["worker"], *answer["candidates"]


async def test_worker_with_the_blocks_on_its_device_wins_over_the_one_that_wrote_them_to_the_pool(
    fleet: PooledFleet, routed: RouterUnderTest
) -> None:
    prompt = fleet.publish_writer_and_holder()
    await fleet.until_known(routed)
    choice, holder, writer = await explained(routed, prompt)
    assert choice == holder["worker"] == fleet.urls[1]
    assert (holder["overlap"], holder["source"], writer["overlap"]) == (64, None, 0)
    assert (writer["source"]["name"], writer["source"]["tokens"]) == ("store", 64)
    assert holder["total"] < writer["total"]
    for salt, found in ((None, [(64, 0), (0, 64)]), ("salt", [(0, 0), (0, 0)])):
        reply = await routed.call("/match", {"model": "m", "token_ids": prompt, "cache_salt": salt})
        matches = [(match["matched_tokens"], match.get("loadable", 0)) for match in reply.json()["matches"]]
        assert matches == found


async def test_keys_of_a_prompt_are_asked_for_where_the_pool_is_too_large_to_list(fleet: PooledFleet) -> None:
    async with router_of(fleet, most_keys=1) as routed:
        prompt = fleet.publish_writer_and_holder()
        await fleet.until_received(routed)

        async def loadable() -> int:
            _, _, writer = await explained(routed, prompt)
            assert writer["worker"] == fleet.urls[0]
            return writer["source"]["tokens"] if writer["source"] else 0

        await until(loadable, lambda tokens: tokens == 64)
        fleet.answering.clear()
        assert await loadable() == 0
        fleet.answering.set()
        fleet.keys.remove(object_key(8))
        assert await loadable() == 32
        fleet.keys.remove(object_key(7))
        assert await loadable() == 0
        assert await routed.metric("kvrouter_pool_known", pool="store") == 0
