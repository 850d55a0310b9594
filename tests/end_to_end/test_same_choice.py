"""The library, the HTTP routes and the proxy make the same choices: they differ only in what sends the request."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
from router_under_test import QUICK, RouterUnderTest, router
from simulated_workers import simulated_workers
from waiting import until

from indexer import Indexer, MatchQuery
from kvrouter import selection
from kvrouter.selection import Prompt, Selector, Stream
from router.app import services
from router.forwarding import attempts, proxied_request, response
from router.routing import build
from router.routing.state import RoutedIndex, RoutingState

DATA = Path(__file__).parents[1] / "data"
# `make test-same-choice` sends 1,000.
REQUESTS = int(os.environ.get("KVROUTER_SAME_CHOICES", "50"))
MODEL, BLOCK, BLOCKS = "simulated", 16, 200
RECORDINGS = ("a_shared_system_prompt_2workers", "c_pressure_evictions", "s1_sglang_radix_page16_evict")


class First(Random):
    """Breaks each tie in the same way, however often it is asked."""

    def random(self) -> float:
        return 0.0

    def getrandbits(self, k: int, /) -> int:  # noqa: ARG002 - the interface of Random
        return 0


class Clock:
    """Advances only between requests, so that all ways choose at the same time."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all choices, whose ties are broken alike."""
    clock = Clock()
    monkeypatch.setattr(build, "Random", First)
    for name in ("Learned", "InFlightPrefixes", "RoutingState"):
        monkeypatch.setattr(build, name, partial(getattr(build, name), clock=clock))
    for module in (attempts, proxied_request, response):
        monkeypatch.setattr(module, "_now", clock)
    return clock


def recorded_prompts() -> Iterator[list[int]]:
    """Return the prompts of requests that were recorded in front of real engines."""
    prompts = []
    for name in RECORDINGS:
        with gzip.open(DATA / f"{name}.requests.jsonl.gz", "rt") as lines:
            prompts += [ids for line in lines if (ids := json.loads(line).get("prompt_token_ids"))]
    Random(1).shuffle(prompts)
    return islice(cycle(prompts), REQUESTS)


async def test_library_routes_and_proxy_choose_alike(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[RoutingState] = []

    def build_state(*parts: Any) -> RoutingState:
        states.append(build.build_state(*parts))
        return states[-1]

    for module in (services, selection):
        monkeypatch.setattr(module, "build_state", build_state)
    seen: Counter[str] = Counter()
    async with (
        simulated_workers(4, num_blocks=BLOCKS, max_model_len=BLOCKS * BLOCK) as urls,
        router(*urls, fleet=QUICK | {"metrics_interval": 60.0}) as routed,
        Selector() as selector,
    ):
        await routed.until_live()
        await declare(routed, selector)
        for prompt in recorded_prompts():
            clock.now += 0.5
            held = await selector.reserve(Prompt(model=MODEL, token_ids=prompt))
            answer = (await routed.call("/selection/select", {"model_name": MODEL, "token_ids": prompt})).json()
            reply = await routed.call("/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 1})
            ways = [
                (held.worker.url, held.selection.overlap),
                (answer["url"], answer["overlap"]["longest_matched"]),
                (reply.worker, reply.overlap),
            ]
            assert len(set(ways)) == 1, (seen, ways)
            assert reply.cached == reply.overlap, seen
            held.first_token()
            held.release(prompt_tokens=len(prompt), cached_tokens=reply.cached)
            seen["requests"] += 1
            seen["hits"] += reply.cached > 0
            seen["full"] += any(states[0].learned.pressure.full(each.target) for each in states[0].indexer.registered())
            for state in states:
                await until_indexed(state.indexer, reply.worker, prompt)
    assert seen["requests"] == REQUESTS
    assert seen["hits"] > REQUESTS // 5
    assert seen["full"] > REQUESTS // 5


async def declare(routed: RouterUnderTest, selector: Selector) -> None:
    """Add the workers of a router to a selector."""
    for worker in await routed.workers():
        name = worker["worker"].partition("://")[2]
        streams = [Stream(rank["dp_rank"], rank["endpoint"]) for rank in worker["ranks"]]
        await selector.upsert_worker(
            name, url=worker["url"], model=MODEL, block_size=BLOCK, capacity=BLOCKS, streams=streams
        )


async def until_indexed(indexer: RoutedIndex, worker: str, prompt: list[int]) -> None:
    """Wait until an index has all blocks of a prompt on the worker that computed it."""
    assert isinstance(indexer, Indexer)
    query = MatchQuery(MODEL, [*prompt, 0])

    def matched() -> int:
        return sum(each.matched_tokens for each in indexer.match(query) if each.target.worker == worker)

    await until(matched, lambda tokens: tokens == len(prompt) // BLOCK * BLOCK)
