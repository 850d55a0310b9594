"""Requests that bypass an engine's prefix cache are predicted without overlap.

The engine behaves like vLLM 0.32: prompts with prompt logprobs are not looked up, and an adapter's blocks depend on its
name and path (`SamplingParams.skip_reading_prefix_cache`, `_gen_lora_extra_hash_keys`).
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, scripted_worker

from kvevents import BlockStored, EventBatch
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running
from worker import ZmqEventPublisher

BLOCK = 16
PROMPT = [5, *range(1000, 1250)]
WHOLE = len(PROMPT) // BLOCK * BLOCK
CHAT = {"messages": [{"role": "user", "content": "x" * 1200}]}


class Engine:
    """A worker that serves `m` and the adapter `poet` with its path. Chats have one token per letter."""

    def __init__(self) -> None:
        self.publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", bind=True)
        self.path = "/adapters/first"
        self._blocks: dict[Any, int] = {}

    async def answer(self, exchange: Exchange) -> None:
        if exchange.method == "GET" or exchange.target.endswith(("/render", "/tokenize")):
            cards = [{"id": "m", "root": "/m"}, {"id": "poet", "root": self.path, "parent": "m"}]
            if exchange.target == "/v1/models":
                await exchange.answer(json.dumps({"data": cards}).encode())
            else:
                await exchange.answer(status="404 Not Found")
            return
        body = json.loads(exchange.body)
        if exchange.target == "/v1/load_lora_adapter":
            self.path = body["lora_path"]
            await exchange.answer()
            return
        if "/embed" in str(body.get("prompt_embeds")):
            prompt, cached = PROMPT, 0
        else:
            prompt = body.get("prompt") or body.get("input_ids") or [ord(letter) for letter in _text_of(body)]
            cached = self._cached(prompt, body["model"] if body["model"] == "poet" else None, body)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        await exchange.answer(json.dumps({"choices": [], "usage": usage}).encode())

    def _cached(self, prompt: list[int], adapter: str | None, body: dict[str, Any]) -> int:
        secret = self.path if adapter else None
        keys = [(adapter, secret, tuple(prompt[:end])) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        cached = 0
        while cached < (len(prompt) - 1) // BLOCK and keys[cached] in self._blocks:
            cached += 1
        events = []
        for place, key in enumerate(keys):
            if key not in self._blocks:
                self._blocks[key] = len(self._blocks) + 1
                parent = self._blocks[keys[place - 1]] if place else None
                stored = BlockStored([self._blocks[key]], parent, list(key[2][-BLOCK:]), BLOCK, lora_name=adapter)
                events.append(stored)
        if events:
            self.publisher.publish(EventBatch(time.time(), events))
        sampling = body.get("sampling_params", {})
        echoes = body.get("echo") and (body.get("logprobs") is not None or "messages" in body)
        computes = echoes or body.get("prompt_logprobs") is not None or sampling.get("prompt_logprobs") is not None
        return 0 if computes else cached * BLOCK


def _text_of(body: dict[str, Any]) -> str:
    return "".join(message["content"] for message in body["messages"])


@pytest.fixture
async def routed() -> AsyncIterator[RouterUnderTest]:
    engine = Engine()
    async with scripted_worker(engine.answer) as worker:
        worker.answers_discovery = False
        streams = [{"endpoint": engine.publisher.endpoint, "replay_endpoint": engine.publisher.replay_endpoint}]
        given = [{"url": worker.url, "block_size": BLOCK, "streams": streams}]
        async with router(workers=given, proxy={"more_routes": ["POST /v1/load_lora_adapter"]}) as routed:
            await routed.until_live()
            yield routed
    engine.publisher.shutdown()


async def ask(routed: RouterUnderTest, path: str = "/v1/completions", **body: Any) -> tuple[int, int]:
    """Send a request, and return its predicted and its cached tokens."""
    reply = await routed.call(path, {"model": "m", **body})
    assert reply.status == 200, reply.body
    return int(reply.overlap or 0), reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize(
    "asked",
    [{"prompt_logprobs": 0}, {"prompt_logprobs": 3}, {"echo": True, "logprobs": 0}, {"echo": True, "logprobs": 2}],
)
async def test_prompt_logprobs_are_predicted_without_cache(routed: RouterUnderTest, asked: dict[str, Any]) -> None:
    assert await ask(routed, prompt=PROMPT) == (0, 0)
    assert await ask(routed, prompt=PROMPT, **asked) == (0, 0)
    assert await ask(routed, prompt=PROMPT) == (WHOLE, WHOLE)


@pytest.mark.parametrize("asked", [{"echo": True}, {"logprobs": 1}, {"prompt_logprobs": None}])
async def test_other_sampling_fields_use_cache(routed: RouterUnderTest, asked: dict[str, Any]) -> None:
    assert await ask(routed, prompt=PROMPT) == (0, 0)
    assert await ask(routed, prompt=PROMPT, **asked) == (WHOLE, WHOLE)


async def test_echoed_chat_is_predicted_without_cache(routed: RouterUnderTest) -> None:
    await ask(routed, "/v1/chat/completions", **CHAT)
    predicted, found = await ask(routed, "/v1/chat/completions", **CHAT, echo=True)
    assert (predicted, found) == (0, 0)
    assert (await ask(routed, "/v1/chat/completions", **CHAT))[0] > 200


async def test_generate_with_prompt_logprobs_is_predicted_without_cache(routed: RouterUnderTest) -> None:
    assert await ask(routed, "/generate", input_ids=PROMPT) == (0, 0)
    assert await ask(routed, "/generate", input_ids=PROMPT, sampling_params={"prompt_logprobs": 1}) == (0, 0)
    assert await ask(routed, "/generate", input_ids=PROMPT, sampling_params={}) == (WHOLE, WHOLE)


@pytest.mark.parametrize("prompt", [None, ""])
async def test_prompt_embeddings_are_predicted_without_cache(routed: RouterUnderTest, prompt: str | None) -> None:
    for _ in range(2):
        assert await ask(routed, prompt=prompt, prompt_embeds="/embedded/") == (0, 0)


async def test_replaced_adapter_finds_no_blocks_of_its_predecessor(routed: RouterUnderTest) -> None:
    assert await ask(routed, prompt=PROMPT) == (0, 0)
    assert await ask(routed, model="poet", prompt=PROMPT) == (0, 0)
    assert await ask(routed, model="poet", prompt=PROMPT) == (WHOLE, WHOLE)
    assert (
        await routed.call("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "/adapters/other"})
    ).status == 200

    async def noticed() -> bool:
        found = await routed.call(
            "/explain", {"path": "/v1/completions", "request": {"model": "poet", "prompt": PROMPT}}
        )
        return bool(found.json()["candidates"][0]["overlap"] == 0)

    await until(noticed)
    assert await ask(routed, model="poet", prompt=PROMPT) == (0, 0)
    assert await ask(routed, model="poet", prompt=PROMPT) == (WHOLE, WHOLE)
    assert await ask(routed, prompt=PROMPT) == (WHOLE, WHOLE)


async def test_worker_without_prefix_caching_has_no_predicted_overlap() -> None:
    async with (
        running(SimulatedWorkerSettings(prefix_caching=False)) as url,
        router(url, fleet={"metrics_interval": 0.05}) as routed,
    ):

        async def predicted() -> int:
            body = {"model": "simulated", "prompt": PROMPT, "max_tokens": 1}
            return (await routed.call("/v1/completions", body)).overlap

        await predicted()
        await until(predicted, lambda found: not found)  # it has said so
        assert [await predicted() for _ in range(3)] == [0, 0, 0]
