"""Prefill and decode workers that are killed in the middle of their work: processes, behind a router."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from itertools import count

import aiohttp
import openai
import pytest
from router_under_test import RouterUnderTest, until
from simulated_pairs import MODEL, STYLES, Pairs, routed

from kvrouter.processes import KvrouterProcess
from kvrouter.tools.demo.disaggregated import run_disaggregated_demo
from simulator.worker.disaggregation.nixl import LEASE_S

pytestmark = pytest.mark.transfer

REQUESTS = 24
numbers = count(1)


class Processes:
    """Two prefill and two decode workers, each a process."""

    def __init__(self, pairs: Pairs, front: RouterUnderTest, by_url: dict[str, KvrouterProcess]) -> None:
        self.pairs = pairs
        self.front = front
        self.by_url = by_url

    def kill(self, url: str) -> None:
        self.by_url[url].send_signal(signal.SIGKILL)
        for urls in (self.pairs.prefills, self.pairs.decodes):
            if url in urls:
                urls.remove(url)


@pytest.fixture(params=STYLES)
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[Processes]:
    async with started(request.param) as made:
        yield made


@asynccontextmanager
async def started(style: str) -> AsyncIterator[Processes]:
    options = ["simulate", "--disaggregation", style, "--prefill-ms=0.1", "--step-ms=2", "--role"]
    with ExitStack() as stack:
        roles = ("prefill", "prefill", "decode", "decode")
        processes = [stack.enter_context(KvrouterProcess([*options, role])) for role in roles]
        urls = [await asyncio.to_thread(process.wait_until_listening) for process in processes]
        async with AsyncExitStack() as more:
            session = await more.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)))
            pairs = Pairs(style, urls[:2], urls[2:], session)
            # At the kill half of the few requests that there were are tried again.
            front = await more.enter_async_context(routed(pairs, proxy={"retry_minimum": REQUESTS}))
            yield Processes(pairs, front, dict(zip(urls, processes, strict=True)))


def prompts() -> Iterator[list[int]]:
    """Long prompts, none of which begins like another."""
    for _ in range(REQUESTS):
        yield [300 + next(numbers), *range(300, 1500)]


async def ask(front: RouterUnderTest, prompt: list[int], tokens: int) -> tuple[bool, str | None]:
    """Stream a completion, and return whether a part of it was received, and the error."""
    begun = False
    try:
        stream = await front.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=tokens, stream=True)
        async for chunk in stream:
            begun = begun or bool(chunk.choices)
    except openai.OpenAIError as error:
        return begun, str(error)
    return begun, None


async def test_killed_prefill_worker_loses_no_request(workers: Processes) -> None:
    pairs, front = workers.pairs, workers.front
    asking = [asyncio.create_task(ask(front, prompt, 8)) for prompt in prompts()]

    await until(lambda: pairs.metric("vllm:num_requests_running", pairs.prefills[0]), lambda value: value > 0)
    workers.kill(pairs.prefills[0])
    assert await asyncio.gather(*asking) == [(True, None)] * REQUESTS
    assert await pairs.metric("simulated:kv_pages_wrong_total") == 0
    await pairs.until_nothing_is_left()
    await front.until_released()


async def test_killed_decode_worker_loses_only_started_streams(workers: Processes) -> None:
    pairs, front = workers.pairs, workers.front
    asking = [asyncio.create_task(ask(front, prompt, 60)) for prompt in prompts()]

    await until(
        lambda: pairs.metric("simulated:kv_transfers_received_total", pairs.decodes[0]), lambda value: value > 1
    )
    workers.kill(pairs.decodes[0])
    ended = await asyncio.gather(*asking)
    assert [error for begun, error in ended if not begun] == []
    assert sum(error is None for _, error in ended) > REQUESTS / 3
    assert await pairs.metric("simulated:kv_pages_wrong_total") == 0
    await front.until_released()
    await pairs.until_nothing_is_left(LEASE_S + 10)  # some blocks were never pulled


def test_disaggregated_demo_succeeds() -> None:
    assert run_disaggregated_demo(conversations=8)
