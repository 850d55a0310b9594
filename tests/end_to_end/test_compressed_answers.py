"""Answers behind a compressing proxy are read: ids of stored responses, usage, and what workers report."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from envoy_client import set_headers
from grpc_call import channel_to
from picker_under_test import BODY, JSON, PATH, Asked, picker
from router_under_test import router
from scripted_worker import scripted_worker
from simulated_pairs import MODEL, simulated_pairs

from router.auth import hashed_key
from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

pytestmark = pytest.mark.anyio

FAST: dict[str, Any] = {"base_step_s": 0.001, "prefill_s_per_token": 0.0, "decode_s_per_sequence": 0.0}
# The header of openai-python.
ACCEPTED = {"accept-encoding": "gzip, deflate, br, zstd"}


@asynccontextmanager
async def compressing(worker: str, default: str = "identity") -> AsyncIterator[str]:
    """A proxy in front of a worker that compresses answers, unless the request asks for none of it.

    `default`: how a request without `accept-encoding` is read.
    """
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def forward(request: web.Request) -> web.Response:
            headers = {"content-type": request.content_type}
            body = await request.read()
            async with session.request(request.method, worker + request.path_qs, data=body, headers=headers) as answer:
                whole, kind = await answer.read(), answer.headers.get("content-type", "text/plain")
            sent = {"content-type": kind}
            if request.headers.get("accept-encoding", default) != "identity":
                whole, sent["content-encoding"] = gzip.compress(whole), "gzip"
            return web.Response(status=answer.status, body=whole, headers=sent)

        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@asynccontextmanager
async def compressed_workers(count: int) -> AsyncIterator[list[str]]:
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(running(SimulatedWorkerSettings(**FAST))) for _ in range(count)]
        yield [await stack.enter_async_context(compressing(worker)) for worker in workers]


async def test_a_stored_response_is_found_behind_a_compressing_proxy() -> None:
    async with compressed_workers(4) as urls, router(*urls) as routed:
        for turn in range(4):
            made = await routed.openai.responses.create(model="simulated", input=f"turn {turn}", max_output_tokens=2)
            for _ in range(4):
                found = await routed.openai.responses.retrieve(made.id)
                following = await routed.openai.responses.create(
                    model="simulated", input="next", previous_response_id=made.id, max_output_tokens=2
                )
                assert found.id == made.id
                assert following.previous_response_id == made.id


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_usage_is_counted_behind_a_compressing_proxy(path: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": "simulated", "max_tokens": 3, "stream": stream}
    body |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    if stream:
        body["stream_options"] = {"include_usage": True}
    tenants = {"named": {"a": {"keys": [hashed_key("key")]}}}
    async with compressed_workers(1) as urls, router(*urls, server={"token": "t"}, tenants=tenants) as routed:
        reply = await routed.call(path, body, headers=ACCEPTED | {"authorization": "Bearer key"})
        assert reply.status == 200, reply.body
        assert await routed.metric("kvrouter_completion_tokens_total") == 3


async def test_probes_are_read_behind_a_compressing_proxy() -> None:
    # RFC 9110, 12.5.3: without `accept-encoding`, any coding is acceptable.
    async with (
        running(SimulatedWorkerSettings(**FAST)) as worker,
        compressing(worker, default="gzip") as url,
        router(url) as routed,
    ):
        (seen,) = await routed.workers()
        assert seen["up"], seen["problem"]


@pytest.mark.parametrize("style", ["sglang", "nixl"])
async def test_the_prefill_is_read_behind_a_compressing_proxy(style: str) -> None:
    async with simulated_pairs(style) as pairs, compressing(pairs.prefills[0]) as prefill:
        known = [{**each, "url": prefill if each["url"] in pairs.prefills else each["url"]} for each in pairs.known]
        async with router(workers=known) as front:
            prompt = {"model": MODEL, "prompt": list(range(64)), "max_tokens": 2}
            reply = await front.call("/v1/completions", prompt, headers=ACCEPTED)
            assert reply.status == 200, reply.body
            assert "x-kvrouter-prefill-worker" in reply.headers


async def test_envoy_is_told_to_ask_for_no_compression() -> None:
    async with scripted_worker() as worker, picker(worker.url) as (side, port), channel_to(port) as channel:
        stream = Asked(side, channel, [worker.url]).stream()
        await stream.head(PATH, JSON, *ACCEPTED.items())
        await stream.body(BODY)
        head = await stream.hears()
        assert set_headers(head.request_headers.response.header_mutation)["accept-encoding"] == "identity"
        await stream.hears()
        await stream.ends()
