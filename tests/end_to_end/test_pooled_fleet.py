"""A router in front of two workers on one shared pool, over real sockets: a recording of vLLM on a Mooncake Store."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import msgspec
import pytest
import zmq
from router_under_test import RouterUnderTest, router, until
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
    - `metrics`: the master's answer in place of its metrics; None: they are right.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.sockets = [context.socket(zmq.XPUB) for _ in range(3)]
        self.endpoints = [f"tcp://127.0.0.1:{each.bind_to_random_port('tcp://127.0.0.1')}" for each in self.sockets]
        self.urls: list[str] = []
        self.keys: set[str] = set()
        self.cached = 0
        self.metrics: str | None = None
        self.answering = threading.Event()
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

    def answer_as_master(self, path: str) -> str:
        """Return the answer of the master's HTTP API."""
        path, _, asked = path.partition("?keys=")
        if path == "/metrics":
            return self.metrics or f"master_evicted_key_count {self._losses}\nmaster_key_count 99999\n"
        if path == "/get_all_keys":
            return "\n".join(self.keys)
        self.answering.wait()
        return json.dumps({"data": {unquote(key): {"ok": unquote(key) in self.keys} for key in asked.split(",")}})

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

    async def until_received(self, routed: RouterUnderTest, known: int = 0) -> None:
        """Wait until the router has received all that was published. `known`: 1 to wait for the pool's content too."""
        blocks = sum("@group:" in key for key in self.keys)
        lines = {f'kvrouter_pool_blocks{{pool="store"}} {blocks:.1f}'}
        if known:
            lines.add('kvrouter_pool_known{pool="store"} 1.0')
        for worker, batches in zip(self.urls, self._sent[:MASTER], strict=True):
            labels = f'dp_rank="0",model="m",tenant="default",worker="{worker}"'
            lines.add(f"kvrouter_stream_batches_total{{{labels}}} {batches:.1f}")

        async def missing() -> set[str]:
            return lines - set((await routed.call("/metrics")).body.decode().splitlines())

        await until(missing, lambda found: not found)

    async def until_known(self, routed: RouterUnderTest) -> None:
        """Wait until the router knows all that was published, and the content of the pool."""
        await self.until_received(routed, known=1)

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


@contextmanager
def master_of(fleet: PooledFleet) -> Iterator[str]:
    """Serve the master's HTTP API in a thread, because the router waits for it in one. Yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = fleet.answer_as_master(self.path).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        fleet.answering.set()
        server.shutdown()
        thread.join()
        server.server_close()


@asynccontextmanager
async def router_of(fleet: PooledFleet, **settings: Any) -> AsyncIterator[RouterUnderTest]:
    """Run a router with further settings of its pool."""
    async with AsyncExitStack() as stack:
        master = stack.enter_context(master_of(fleet))
        pool = {"name": "store", "type": "mooncake", "master": master, "events": fleet.endpoints[MASTER]}
        workers = [
            {"url": url, "block_size": BLOCK, "streams": [{"endpoint": endpoint}]}
            for url, endpoint in zip(fleet.urls, fleet.endpoints, strict=False)
        ]
        proxy = {"client_routing": True}
        routed = await stack.enter_async_context(
            router(
                workers=workers,
                pools=[pool | {"interval": 0.02} | settings],
                proxy=proxy,
                constants={"linger": 0, "catch_up": 0},
            )
        )
        for socket in fleet.sockets:
            await until(lambda socket=socket: socket.poll(0))  # the router's subscription
        await routed.until_tokenizers_are_tried()
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
                await fleet.until_received(routed)
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
    assert {found["finding"] for found in await routed.findings()} <= {"prompts_by_text", "replay_missing"}
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
        await until(loadable, lambda tokens: tokens == 32)  # a busy machine may miss the deadline of an answer
        fleet.keys.remove(object_key(7))
        await until(loadable, lambda tokens: tokens == 0)
        assert await routed.metric("kvrouter_pool_known", pool="store") == 0


async def test_master_whose_answers_cannot_be_read_is_a_finding(fleet: PooledFleet, routed: RouterUnderTest) -> None:
    await fleet.until_known(routed)
    fleet.metrics = "master_key_count 1e999"
    found = await until_found(routed, "pool_unknown")
    assert "does not answer" in found["detail"]
    fleet.metrics = None
    await fleet.until_known(routed)
    assert "pool_unknown" not in {each["finding"] for each in await routed.findings()}


async def until_found(routed: RouterUnderTest, finding: str) -> dict[str, Any]:
    """Wait for a finding of `/health`, and return it."""
    found: list[dict[str, Any]] = []

    async def seen() -> bool:
        found[:] = [each for each in await routed.findings() if each["finding"] == finding]
        return bool(found)

    await until(seen)
    return found[0]
