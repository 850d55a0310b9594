"""Answers that are slow because they are long: their workers are neither ejected nor relieved of them.

The table has workers with and without engine metrics, with and without a response to scrapes, and outputs of 1 to
4,000 tokens. A generation never runs twice while its worker shows that it lives.
"""

from __future__ import annotations

import asyncio
import gzip
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from enum import StrEnum
from itertools import product
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from envoy_client import set_headers
from grpc_call import channel_to
from picker_under_test import PickerUnderTest, picker
from router_under_test import RouterUnderTest, router
from running_app import running_app
from scripted_worker import Exchange, ScriptedWorker, scripted_worker
from simulated_pairs import MODEL, simulated_pairs
from simulated_workers import simulated_workers

from router.auth import hashed_key

OUTPUTS = (1, 10, 100, 1000, 4000)
SECONDS_PER_TOKEN = 0.0008
FLEET = {"metrics_interval": 0.25, "stall_seconds": 1.0}


class Source(StrEnum):
    """A worker's answer to a scrape of its metrics."""

    NOTHING = "404"
    COUNTERS = "counters that rise"
    STILL = "counters that rise at the end of an answer"


def body(tokens: int | None, streamed: bool) -> dict[str, object]:
    limit = {} if tokens is None else {"max_tokens": tokens}
    return {"model": "m", "prompt": "x", "stream": streamed, "user": str(tokens), **limit}


def script_of(worker: ScriptedWorker, source: Source, outputs: list[int]) -> None:
    """Let a worker take the time of as many tokens as the test lists, request by request."""
    computed = 0

    async def answer(exchange: Exchange) -> None:
        nonlocal computed
        tokens = outputs.pop(0)
        streamed = b'"stream": true' in exchange.body
        if streamed:
            await exchange.begin_chunks()
            await exchange.chunk(b"data: 1\n\n")
        for _ in range(10):
            await asyncio.sleep(tokens * SECONDS_PER_TOKEN / 10)
            if source is Source.COUNTERS:
                computed += 1
                worker.metrics = b"vllm:generation_tokens_total %d\n" % computed
        if source is Source.STILL:
            computed += 1
            worker.metrics = b"vllm:generation_tokens_total %d\n" % computed
        await (exchange.chunk(b"") if streamed else exchange.answer())

    worker.script = answer
    if source in (Source.COUNTERS, Source.STILL):
        worker.metrics = b"vllm:generation_tokens_total 0\n"


async def states(routed: RouterUnderTest) -> set[str]:
    return {str(each["state"]) for each in await routed.workers()}


@pytest.mark.parametrize("limited", [True, False])
@pytest.mark.parametrize("streamed", [True, False])
async def test_long_outputs_eject_no_worker_and_are_computed_once(streamed: bool, limited: bool) -> None:
    async def row(source: Source) -> None:
        async with scripted_worker() as one, scripted_worker() as other:
            outputs = [33] * 40 + list(OUTPUTS)
            for worker in (one, other):
                script_of(worker, source, outputs)
            policy = {"name": "round_robin"}
            async with router(one.url, other.url, fleet=FLEET, policy=policy) as routed:
                usual = [routed.call("/v1/completions", body(33 if limited else None, streamed)) for _ in range(40)]
                assert {(await reply).status for reply in usual} == {200}
                seen: set[str] = set()
                long = [
                    asyncio.create_task(routed.call("/v1/completions", body(tokens if limited else None, streamed)))
                    for tokens in OUTPUTS
                ]
                while not all(task.done() for task in long):
                    seen |= await states(routed)
                    await asyncio.sleep(0.1)
                assert {task.result().status for task in long} == {200}
                assert "ejected" not in seen, source
                computed = [each for worker in (one, other) for each in worker.exchanges if each.method == "POST"]
                assert len(computed) == 40 + len(OUTPUTS), source

    await asyncio.gather(*(row(source) for source in (Source.NOTHING, Source.COUNTERS, Source.STILL)))


async def test_a_worker_that_answers_probes_is_not_hung() -> None:
    await asyncio.gather(*map(probed, ("answered", "never answered", "no longer answered")))


async def probed(scrapes: str) -> None:
    hold = asyncio.Event()

    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted_worker()) for _ in range(2)]
        for worker in workers:
            worker.silent_metrics = scrapes == "never answered"
        routed = await stack.enter_async_context(
            router(*[each.url for each in workers], fleet=FLEET, policy={"name": "round_robin"})
        )
        for _ in range(4):
            assert (await routed.call("/v1/completions", body(5, False))).status == 200
        before = sum(len(worker.exchanges) for worker in workers)

        async def late(exchange: Exchange) -> None:
            await hold.wait()
            await exchange.answer()

        for worker in workers:
            worker.script = late
            worker.silent_metrics = scrapes != "answered"
        request = asyncio.create_task(routed.call("/v1/completions", body(5, False)))
        await asyncio.sleep(4)
        assert await states(routed) <= {"ready", "warming"}
        assert sum(len(worker.exchanges) for worker in workers) == before + 1
        hold.set()
        assert (await request).status == 200


HI = {"content": "hi"}
# The header of openai-python.
ACCEPTED = {"accept-encoding": "gzip, deflate, br, zstd"}
CODINGS = pytest.mark.parametrize("coding", [None, "gzip", "deflate"], ids=["if accepted", "gzip", "deflate"])


@asynccontextmanager
async def compressing(worker: str, default: str = "identity", coding: str | None = None) -> AsyncIterator[str]:
    """Run a proxy in front of a worker that compresses responses, unless the request accepts identity only.

    - `default`: the encoding of a request without `accept-encoding`.
    - `coding`: the content-encoding of every response, whatever the request accepts.
    """
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def forward(request: web.Request) -> web.Response:
            headers = {"content-type": request.content_type}
            body = await request.read()
            async with session.request(request.method, worker + request.path_qs, data=body, headers=headers) as answer:
                whole, kind = await answer.read(), answer.headers.get("content-type", "text/plain")
            sent = {"content-type": kind}
            if coding == "deflate":
                whole, sent["content-encoding"] = zlib.compress(whole), coding
            elif coding or request.headers.get("accept-encoding", default) != "identity":
                whole, sent["content-encoding"] = gzip.compress(whole), "gzip"
            return web.Response(status=answer.status, body=whole, headers=sent)

        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", forward)
        async with running_app(app) as url:
            yield url


@asynccontextmanager
async def compressed_workers(count: int, coding: str | None = None) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack, simulated_workers(count) as workers:
        yield [await stack.enter_async_context(compressing(worker, coding=coding)) for worker in workers]


@CODINGS
async def test_stored_response_is_found_behind_compressing_proxy(coding: str | None) -> None:
    async with compressed_workers(4, coding) as urls, router(*urls) as routed:
        for turn in range(2):
            made = await routed.openai.responses.create(model="simulated", input=f"turn {turn}", max_output_tokens=2)
            for _ in range(4):
                found = await routed.openai.responses.retrieve(made.id)
                following = await routed.openai.responses.create(
                    model="simulated", input="next", previous_response_id=made.id, max_output_tokens=2
                )
                assert found.id == made.id
                assert following.previous_response_id == made.id


@CODINGS
async def test_usage_is_counted_behind_compressing_proxy(coding: str | None) -> None:
    tenants = {"named": {"a": {"keys": [hashed_key("key")]}}}
    prompts: dict[str, Any] = {
        "/v1/completions": {"prompt": "hi"},
        "/v1/chat/completions": {"messages": [{"role": "user"} | HI]},
    }
    async with compressed_workers(1, coding) as urls, router(*urls, server={"token": "t"}, tenants=tenants) as routed:
        for number, (path, stream) in enumerate(product(prompts, (True, False)), 1):
            body: dict[str, Any] = {"model": "simulated", "max_tokens": 3, "stream": stream, **prompts[path]}
            if stream:
                body["stream_options"] = {"include_usage": True}
            reply = await routed.call(path, body, headers=ACCEPTED | {"authorization": "Bearer key"})
            assert reply.status == 200, reply.body
            assert await routed.metric("kvrouter_completion_tokens_total") == 3 * number, (path, stream)


async def test_probes_are_read_behind_compressing_proxy() -> None:
    # RFC 9110, 12.5.3: without `accept-encoding`, any coding is acceptable.
    async with (
        simulated_workers(1) as [worker],
        compressing(worker, default="gzip") as url,
        router(url) as routed,
    ):
        (seen,) = await routed.workers()
        assert seen["up"], seen["problem"]


@pytest.mark.parametrize("style", ["sglang", "nixl"])
async def test_prefill_is_read_behind_compressing_proxy(style: str) -> None:
    async with simulated_pairs(style) as pairs:
        for coding in (None, "gzip", "deflate"):
            async with compressing(pairs.prefills[0], coding=coding) as prefill:
                urls = {pairs.prefills[0]: prefill}
                known = [{**each, "url": urls.get(each["url"], each["url"])} for each in pairs.known]
                async with router(workers=known, disaggregation={"decode_computes": False}) as front:
                    prompt = {"model": MODEL, "prompt": list(range(64)), "max_tokens": 2}
                    reply = await front.call("/v1/completions", prompt, headers=ACCEPTED)
                    assert reply.status == 200, (coding, reply.body)
                    assert "x-kvrouter-prefill-worker" in reply.headers, coding


async def test_picker_sets_accept_encoding_to_identity() -> None:
    async with scripted_worker() as worker, picker(worker.url) as (side, port), channel_to(port) as channel:
        stream = await PickerUnderTest(side, channel, [worker.url]).sent(headers=ACCEPTED.items())
        head = await stream.receive()
        assert set_headers(head.request_headers.response.header_mutation)["accept-encoding"] == "identity"
        await stream.receive()
        await stream.finish()
