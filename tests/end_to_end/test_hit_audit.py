"""The audit of predicted overlaps against the cached tokens that workers report."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_worker

from kvevents import BlockStored, EventBatch
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running
from worker import ZmqEventPublisher

BLOCK, SAMPLES = 16, 4
NOW = {"constants": {"audit_samples": SAMPLES, "linger": 0}}


class Engine:
    """A worker whose cache never forgets. `tells`: its events say what it caches. `extra`: tokens it adds itself.
    `drafts`: it computes the last block of a hit again."""

    def __init__(self) -> None:
        self.tells = True
        self.drafts = False
        self.extra = 0
        self.publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", bind=True)
        self._blocks: dict[tuple[int, ...], int] = {}

    def streams(self) -> list[dict[str, Any]]:
        return [{"endpoint": self.publisher.endpoint, "replay_endpoint": self.publisher.replay_endpoint}]

    async def answer(self, exchange: Exchange) -> None:
        body = json.loads(exchange.body)
        prompt = body["prompt"]
        usage = {
            "prompt_tokens": len(prompt) + self.extra,
            "completion_tokens": 1,
            "prompt_tokens_details": {"cached_tokens": self._cached(prompt)},
        }
        if not body.get("stream"):
            await exchange.answer(json.dumps({"choices": [], "usage": usage}).encode())
            return
        await exchange.begin_chunks()
        events = b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in ({}, {"usage": usage}))
        for byte in (*(events[at : at + 7] for at in range(0, len(events), 7)), b"data: [DONE]\n\n", b""):
            await exchange.chunk(byte)

    def _cached(self, prompt: list[int]) -> int:
        """Return the cached tokens of a prompt, and cache the whole prompt."""
        prefixes = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        cached = sum(prefix in self._blocks for prefix in prefixes if len(prefix) < len(prompt))
        for prefix in prefixes:
            if prefix not in self._blocks:
                self._blocks[prefix] = len(self._blocks) + 1
                self.tell(prefix)
        return max(cached - self.drafts, 0) * BLOCK

    def tell(self, prefix: tuple[int, ...]) -> None:
        """Publish the last block of a prefix."""
        if self.tells:
            parent = self._blocks.get(prefix[:-BLOCK])
            stored = BlockStored([self._blocks[prefix]], parent, list(prefix[-BLOCK:]), BLOCK)
            self.publisher.publish(EventBatch(time.time(), [stored]))

    def tell_all(self) -> None:
        self.tells = True
        for prefix in self._blocks:
            self.tell(prefix)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    yield engine
    engine.publisher.shutdown()


@pytest.fixture
async def worker(engine: Engine) -> AsyncIterator[ScriptedWorker]:
    async with scripted_worker(engine.answer) as worker:
        yield worker


@pytest.fixture
async def routed(engine: Engine, worker: ScriptedWorker) -> AsyncIterator[RouterUnderTest]:
    async with router(workers=[{"url": worker.url, "block_size": BLOCK, "streams": engine.streams()}], **NOW) as routed:
        await routed.until_live()
        yield routed


def prompt(number: int, length: int = 100) -> list[int]:
    return [number, *range(1000, 999 + length)]


async def ask(routed: RouterUnderTest, tokens: list[int], **more: Any) -> int:
    """Ask for a completion; the overlap that was predicted."""
    reply = await routed.call("/v1/completions", {"model": "m", "prompt": tokens, **more})
    assert reply.status == 200, reply.body
    return reply.overlap


async def ask_and_see(routed: RouterUnderTest, tokens: list[int], **more: Any) -> None:
    """Ask, and wait until the index knows it."""
    await ask(routed, tokens, **more)

    async def seen() -> bool:
        matches = (await routed.call("/match", {"model": "m", "token_ids": tokens})).json()["matches"]
        return bool(matches[0]["matched_tokens"] == (len(tokens) - 1) // BLOCK * BLOCK)

    await until(seen)


async def basis(routed: RouterUnderTest) -> str:
    for name in ("events", "resynced", "sent_prefixes"):
        if await routed.metric("kvrouter_audit_basis", basis=name) == 1:
            return name
    return "none"


async def findings(routed: RouterUnderTest) -> list[str]:
    """But for that there is no tokenizer: prompts are token ids here."""
    found = [finding["finding"] for finding in await routed.findings()]
    return [finding for finding in found if finding not in ("prompts_by_text", "tokenizer_missing")]


@pytest.mark.parametrize("stream", [False, True])
async def test_audit_compares_predicted_with_reported_hits(routed: RouterUnderTest, stream: bool) -> None:
    for _ in range(3):
        await ask_and_see(routed, prompt(1), stream=stream)
    assert await routed.metric("kvrouter_audit_answers_total") == 3
    assert await routed.metric("kvrouter_audit_prompt_tokens_total") == 300
    assert await routed.metric("kvrouter_audit_cached_tokens_total") == 192
    assert await routed.metric("kvrouter_audit_predicted_tokens_total") == 192
    assert await routed.metric("kvrouter_audit_wrong_tokens_total") == 0
    assert (await basis(routed), await findings(routed)) == ("events", [])


@pytest.mark.parametrize("asks", [False, True])
async def test_usage_is_requested_for_the_client_if_enabled(asks: bool) -> None:
    settings = SimulatedWorkerSettings(base_step_s=0.001, prefill_s_per_token=0.0, model="m")
    async with running(settings) as url, router(url, proxy={"ask_usage": asks}) as routed:
        stream = {"model": "m", "prompt": prompt(1), "max_tokens": 3, "stream": True}
        reply = await routed.call("/v1/completions", stream)
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert b'"usage"' not in reply.body
        assert await routed.metric("kvrouter_audit_answers_total") == (1 if asks else 0)
        reply = await routed.call("/v1/completions", stream | {"stream_options": {"include_usage": True}})
        assert b'"usage"' in reply.body


async def test_missing_events_are_replaced_by_sent_prefixes_until_fixed(
    engine: Engine, routed: RouterUnderTest
) -> None:
    engine.tells = False
    await ask(routed, prompt(1))
    assert [await ask(routed, prompt(1)) for _ in range(SAMPLES - 1)] == [0] * (SAMPLES - 1)
    assert await basis(routed) == "resynced"

    async def resynced() -> bool:
        return await routed.metric("kvrouter_stream_resyncs_total") == 1 and (
            await routed.metric("kvrouter_stream_state", state="live") == 1
        )

    await until(resynced)
    while await basis(routed) == "resynced":
        await ask(routed, prompt(1))
    assert (await basis(routed), await findings(routed)) == ("sent_prefixes", ["drift"])
    assert await ask(routed, prompt(1)) == 96
    assert await ask(routed, [*prompt(1, 50), 7, 7, 7]) == 48

    engine.tell_all()
    for number in range(2, 10 * SAMPLES):  # more than the window, which remembers the wrong ones
        await ask_and_see(routed, prompt(number))
        await ask(routed, prompt(number))
        if await basis(routed) == "events":
            break
    assert (await basis(routed), await findings(routed)) == ("events", [])


async def test_recomputed_draft_block_is_not_predicted(engine: Engine, routed: RouterUnderTest) -> None:
    engine.drafts = True
    for _ in range(3):  # of the first nothing is held
        await ask_and_see(routed, prompt(1))
    assert await ask(routed, prompt(1)) == 80
    (worker,) = (await routed.call("/workers")).json()["workers"]
    assert worker["ranks"][0]["recomputed_tokens"] == BLOCK
    engine.drafts = False
    await ask(routed, prompt(1))
    await ask(routed, prompt(1))
    assert await ask(routed, prompt(1)) == 96


async def test_first_hit_of_drafting_worker_sets_correction(engine: Engine, worker: ScriptedWorker) -> None:
    engine.drafts = True
    worker.metrics = b'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:spec_decode_num_drafts_total{engine="0"} 0\n'
    streams = {"url": worker.url, "block_size": BLOCK, "streams": engine.streams()}
    async with router(workers=[streams], fleet={"metrics_interval": 60}, **NOW) as routed:

        async def scraped() -> bool:
            live = await routed.metric("kvrouter_stream_state", state="live") == 1
            return live and await routed.metric("kvrouter_kv_usage_ratio") == 0.5

        await until(scraped)
        await ask_and_see(routed, prompt(1))
        assert [await ask(routed, prompt(1)) for _ in range(2)] == [96, 80]


async def test_different_prompt_length_is_a_finding(engine: Engine, routed: RouterUnderTest) -> None:
    engine.extra = 5
    for _ in range(SAMPLES):
        await ask_and_see(routed, prompt(1))
    assert (await findings(routed), await basis(routed)) == (["prompt_length"], "events")
    assert await routed.metric("kvrouter_audit_lengths_wrong_total") == SAMPLES
    engine.extra = 0
    for _ in range(SAMPLES):
        await ask(routed, prompt(1))
    assert await findings(routed) == []


async def test_worker_without_events_is_predicted_by_sent_prefixes(worker: ScriptedWorker) -> None:
    async with scripted_worker(worker.script) as other, router(worker.url, other.url, **NOW) as routed:
        assert await ask(routed, prompt(1)) == 0
        first = await routed.call("/v1/completions", {"model": "m", "prompt": prompt(1)})
        assert first.overlap == 96
        again = await routed.call("/v1/completions", {"model": "m", "prompt": [*prompt(1), 3, 4, 5]})
        assert (again.worker, again.overlap) == (first.worker, 96)
        assert await ask(routed, prompt(2)) == 0
