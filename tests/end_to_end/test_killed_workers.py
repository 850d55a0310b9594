"""Workers that are killed and hang under load: processes behind a router, and a small form of `make bench-chaos`."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from itertools import count
from typing import Any

import aiohttp
import openai
import pytest
from router_under_test import RouterUnderTest, router, until
from simulated_pairs import MODEL, STYLES, Pairs, routed
from structlog.testing import capture_logs

from benchmarks.chaos.faults import HANG, KILL
from benchmarks.chaos.run import Plan, run_chaos
from benchmarks.ports import free_port
from kvrouter.processes import KvrouterProcess
from kvrouter.tools.demo.disaggregated import run_disaggregated_demo
from simulator.worker.kv_transfer.nixl import LEASE_S

PROBED = {"probe_interval": 0.2, "probe_timeout": 0.5}
PROMPT = {"model": "simulated", "prompt": " ".join(map(str, range(100))), "max_tokens": 1}


async def states(routed: RouterUnderTest) -> set[str]:
    return {rank["state"] for worker in await routed.workers() for rank in worker["ranks"]}


async def until_streams_are(routed: RouterUnderTest, state: str) -> None:
    await until(lambda: states(routed), lambda found: found == {state})


async def live_row(routed: RouterUnderTest) -> Any:
    """Return the worker's rank from the feed of the live page."""
    async with routed.request("/live") as live:
        while True:
            line = (await live.content.readline()).decode()
            if line.startswith("data:"):
                (rank,) = json.loads(line.removeprefix("data:"))["ranks"].values()
                return rank


async def test_stream_of_killed_worker_is_stale_until_restart() -> None:
    port = free_port()
    arguments = ["simulate", "--port", str(port)]
    with capture_logs() as logs, KvrouterProcess(arguments) as killed:
        url = await asyncio.to_thread(killed.wait_until_listening)
        async with router(workers=[{"url": url, "name": "gpu"}], fleet=PROBED) as routed:
            await until_streams_are(routed, "live")
            assert (await routed.call("/v1/completions", PROMPT)).status == 200

            await until(
                lambda: routed.metric("kvrouter_index_blocks", worker="gpu", tier="gpu"), lambda value: value > 0
            )
            killed.send_signal(signal.SIGKILL)
            await until_streams_are(routed, "stale")
            assert await routed.metric("kvrouter_stream_state", worker="gpu", state="live") == 0
            assert await routed.metric("kvrouter_stream_state", worker="gpu", state="stale") == 1
            shown = await live_row(routed)
            assert (shown["stream"], shown["held"]["gpu"] > 0) == ("stale", True)

            with KvrouterProcess(arguments) as another:
                await asyncio.to_thread(another.wait_until_listening)
                await until_streams_are(routed, "live")
                assert (await live_row(routed))["stream"] == "live"
    assert not any("agreement" in line["event"] for line in logs if line.get("worker") == "gpu")


async def test_stream_of_stopped_worker_is_stale_and_not_encrypted() -> None:
    with KvrouterProcess(["simulate"]) as stopped, capture_logs() as logs:
        url = await asyncio.to_thread(stopped.wait_until_listening)
        async with router(url, fleet=PROBED) as routed:
            await until_streams_are(routed, "live")
            stopped.send_signal(signal.SIGSTOP)
            try:
                await until_streams_are(routed, "stale")
                found = await routed.findings()
                assert {each["finding"] for each in found} == {"worker_down"}
            finally:
                stopped.send_signal(signal.SIGCONT)
            await until_streams_are(routed, "live")
    assert not any("encrypted" in str(line) for line in logs if line.get("worker") == url)


async def test_idle_checks_are_not_counted_as_replays() -> None:
    with KvrouterProcess(["simulate"]) as worker:
        url = await asyncio.to_thread(worker.wait_until_listening)
        async with router(url, constants={"idle_check": 0.2}) as routed:
            await until_streams_are(routed, "live")

            await until(lambda: routed.metric("kvrouter_stream_idle_checks_total"), lambda value: value >= 2)
            assert await routed.metric("kvrouter_stream_replays_total") == 1
            ((rank,),) = [each["ranks"] for each in await routed.workers()]
            assert rank["batches"]["idle_checks"] >= 2


SMALL = Plan(workers=3, streams=12, seconds=8.0, tokens=10, step_ms=50.0)


async def test_faults_lose_no_waiting_request_and_release_all_load() -> None:
    result = await run_chaos(SMALL, [HANG, KILL])
    for phase in result.phases:
        assert len(phase.streams) > SMALL.streams
        assert [stream.problem for stream in phase.lost] == []
    undisturbed, hung, killed = result.phases
    assert undisturbed.broken == hung.broken == []
    assert len(killed.broken) <= SMALL.streams  # those that had begun on it
    assert hung.noticed is not None  # before the phase ended
    assert result.left_over == 0


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
            front = await more.enter_async_context(routed(pairs, constants={"retry_minimum": REQUESTS}))
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


@pytest.mark.transfer
async def test_killed_prefill_worker_loses_no_request(workers: Processes) -> None:
    pairs, front = workers.pairs, workers.front
    asking = [asyncio.create_task(ask(front, prompt, 8)) for prompt in prompts()]

    await until(lambda: pairs.metric("vllm:num_requests_running", pairs.prefills[0]), lambda value: value > 0)
    workers.kill(pairs.prefills[0])
    assert await asyncio.gather(*asking) == [(True, None)] * REQUESTS
    assert await pairs.metric("simulated:kv_pages_wrong_total") == 0
    await pairs.until_nothing_is_left()
    await front.until_released()


@pytest.mark.transfer
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


@pytest.mark.transfer
def test_disaggregated_demo_succeeds() -> None:
    assert run_disaggregated_demo(conversations=8)
