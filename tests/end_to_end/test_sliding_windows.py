"""Predicted and cached tokens of models with sliding windows, whose layers keep only the last tokens of a prompt.

The engine keeps the same blocks as vLLM 0.32 (SlidingWindowManager and replay_boundaries). The group of full attention
keeps every block of a prompt. The sliding group keeps the blocks that a request needs which continues from the prompt's
end, or from its fork from another prompt.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, scripted_worker

from kvevents import AllBlocksCleared, BlockStored, EventBatch
from worker import ZmqEventPublisher

BLOCK, WINDOW = 16, 64
KEPT = -(-(WINDOW - 1) // BLOCK)  # blocks


class WindowEngine:
    """`tells`: its events are published; else they wait until `tell` is called."""

    def __init__(self) -> None:
        self.publisher = ZmqEventPublisher(0, "tcp://127.0.0.1:0", "tcp://127.0.0.1:0", bind=True)
        self.tells = True
        self.full: dict[tuple[int, ...], int] = {}
        self.sliding: set[tuple[int, ...]] = set()
        self._waiting: list[Any] = []

    def streams(self) -> list[dict[str, Any]]:
        return [{"endpoint": self.publisher.endpoint, "replay_endpoint": self.publisher.replay_endpoint}]

    async def answer(self, exchange: Exchange) -> None:
        prompt = json.loads(exchange.body)["prompt"]
        details = {"cached_tokens": self.compute(prompt)}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 1, "prompt_tokens_details": details}
        await exchange.answer(json.dumps({"choices": [], "usage": usage}).encode())

    def compute(self, prompt: list[int]) -> int:
        prefixes = [tuple(prompt[:end]) for end in range(BLOCK, len(prompt) + 1, BLOCK)]
        possible = (len(prompt) - 1) // BLOCK
        whole = 0
        while whole < possible and prefixes[whole] in self.full:
            whole += 1
        hit = whole
        while hit and not all(prefix in self.sliding for prefix in prefixes[max(hit - KEPT, 0) : hit]):
            hit -= 1
        events: list[Any] = []
        for place, prefix in enumerate(prefixes):
            if prefix not in self.full:
                self.full[prefix] = len(self.full) + 1
                parent = self.full[prefixes[place - 1]] if place else None
                events.append(
                    BlockStored(
                        [self.full[prefix]],
                        parent,
                        list(prefix[-BLOCK:]),
                        BLOCK,
                        group_idx=0,
                        kv_cache_spec_kind="full_attention",
                    )
                )
        for boundary in {possible, whole if whole > hit else 0}:
            for prefix in prefixes[max(boundary - KEPT, 0) : boundary]:
                if prefix not in self.sliding:
                    self.sliding.add(prefix)
                    events.append(
                        BlockStored(
                            [self.full[prefix]],
                            None,
                            [],
                            BLOCK,
                            group_idx=1,
                            kv_cache_spec_kind="sliding_window",
                            kv_cache_spec_sliding_window=WINDOW,
                        )
                    )
        self._waiting += events
        if self.tells:
            self.tell()
        return hit * BLOCK

    def tell(self) -> None:
        self.publisher.publish(EventBatch(time.time(), self._waiting))
        self._waiting = []

    def reset(self) -> None:
        """Clear the cache. Like vLLM, the event is published with the next step."""
        self.full.clear()
        self.sliding.clear()
        self._waiting.append(AllBlocksCleared())


@asynccontextmanager
async def window_fleet(**sections: Any) -> AsyncIterator[tuple[RouterUnderTest, WindowEngine]]:
    engine = WindowEngine()
    async with (
        scripted_worker(engine.answer) as worker,
        router(workers=[{"url": worker.url, "block_size": BLOCK, "streams": engine.streams()}], **sections) as routed,
    ):
        await routed.until_live()
        # From its first events the router knows that the engine has windows.
        await ask(routed, [7] * 100)

        async def known() -> bool:
            sibling = {"model": "m", "prompt": [7] * 90 + [8] * 10}
            found = await routed.call("/explain", {"path": "/v1/completions", "request": sibling})
            return bool(found.json()["candidates"][0]["overlap"] == 0)

        await until(known)
        yield routed, engine
    engine.publisher.shutdown()


async def ask(routed: RouterUnderTest, prompt: list[int]) -> tuple[int, int]:
    """Send a prompt, and return its predicted and its cached tokens."""
    reply = await routed.call("/v1/completions", {"model": "m", "prompt": prompt})
    return int(reply.overlap or 0), reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def document(number: int, length: int = 640) -> list[int]:
    return [number, *range(1000, 999 + length)]


@pytest.mark.parametrize("tells", [True, False])
async def test_shared_prefix_is_found_from_third_prompt_on(tells: bool) -> None:
    async with window_fleet() as (routed, engine):
        engine.tells = tells
        assert await ask(routed, document(0)) == (0, 0)
        assert await ask(routed, [*document(0)[:320], *document(1)]) == (0, 0)
        assert await ask(routed, [*document(0)[:320], *document(2)]) == (320, 320)
        assert await ask(routed, [*document(0)[:480], *document(3)]) == (320, 320)


@pytest.mark.parametrize("tells", [True, False])
@pytest.mark.parametrize("length", [640, 650])
async def test_next_turn_finds_previous_turn(tells: bool, length: int) -> None:
    async with window_fleet() as (routed, engine):
        engine.tells = tells
        prompt = document(0, length)
        assert await ask(routed, prompt) == (0, 0)
        for turn in range(4):
            found = (len(prompt) - 1) // BLOCK * BLOCK
            assert await ask(routed, prompt) == (found, found)
            prompt = [*prompt, *document(turn + 1, 100)]
            assert await ask(routed, prompt) == (found, found)


@pytest.mark.parametrize("tells", [True, False])
async def test_prompts_within_window_are_found(tells: bool) -> None:
    async with window_fleet() as (routed, engine):
        engine.tells = tells
        assert await ask(routed, [9] * 60) == (0, 0)
        assert await ask(routed, [9] * 40 + [8] * 20) == (32, 32)


async def test_prediction_error_is_small_while_events_are_delayed() -> None:
    random = Random(7)
    prompt_tokens = over = under = 0
    async with window_fleet() as (routed, engine):
        prompts = [document(0)]
        for number in range(80):
            engine.tells = random.random() < 0.7
            known = random.choice(prompts)
            prompt = [*known[: random.randrange(len(known) + 1)], *document(number, random.randrange(300))][:2000]
            prompts.append(prompt or [1])
            predicted, found = await ask(routed, prompts[-1])
            prompt_tokens += len(prompt)
            over += max(predicted - found, 0)
            under += max(found - predicted, 0)
    assert over < 0.01 * prompt_tokens
    assert under < 0.05 * prompt_tokens


async def test_reset_at_engine_is_learned_from_one_response() -> None:
    async with window_fleet() as (routed, engine):
        assert await ask(routed, document(0)) == (0, 0)
        assert await ask(routed, document(1)) == (0, 0)

        await until(lambda: routed.metric("kvrouter_index_blocks", tier="gpu"), lambda value: value >= 2 * 40)
        engine.reset()
        assert (await ask(routed, document(2)))[1] == 0

        await until(lambda: routed.metric("kvrouter_index_blocks", tier="gpu"), lambda value: value <= 40)
        assert await ask(routed, document(0)) == (0, 0)
        assert await ask(routed, document(1)) == (0, 0)
        assert await ask(routed, document(1)) == (624, 624)
