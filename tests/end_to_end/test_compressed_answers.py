"""Responses behind a compressing proxy: ids of stored responses, usage, probes and prefills are read."""

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
from picker_under_test import PickerUnderTest, picker
from router_under_test import router
from scripted_worker import scripted_worker
from simulated_pairs import MODEL, simulated_pairs
from simulated_workers import simulated_workers

from router.auth import hashed_key

# The header of openai-python.
ACCEPTED = {"accept-encoding": "gzip, deflate, br, zstd"}


@asynccontextmanager
async def compressing(worker: str, default: str = "identity") -> AsyncIterator[str]:
    """Run a proxy in front of a worker that compresses responses, unless the request accepts identity only.

    `default` is the encoding of a request without `accept-encoding`.
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
    async with AsyncExitStack() as stack, simulated_workers(count) as workers:
        yield [await stack.enter_async_context(compressing(worker)) for worker in workers]


async def test_stored_response_is_found_behind_compressing_proxy() -> None:
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
async def test_usage_is_counted_behind_compressing_proxy(path: str, stream: bool) -> None:
    body: dict[str, Any] = {"model": "simulated", "max_tokens": 3, "stream": stream}
    body |= {"prompt": "hi"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    if stream:
        body["stream_options"] = {"include_usage": True}
    tenants = {"named": {"a": {"keys": [hashed_key("key")]}}}
    async with compressed_workers(1) as urls, router(*urls, server={"token": "t"}, tenants=tenants) as routed:
        reply = await routed.call(path, body, headers=ACCEPTED | {"authorization": "Bearer key"})
        assert reply.status == 200, reply.body
        assert await routed.metric("kvrouter_completion_tokens_total") == 3


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
    async with simulated_pairs(style) as pairs, compressing(pairs.prefills[0]) as prefill:
        known = [{**each, "url": prefill if each["url"] in pairs.prefills else each["url"]} for each in pairs.known]
        async with router(workers=known) as front:
            prompt = {"model": MODEL, "prompt": list(range(64)), "max_tokens": 2}
            reply = await front.call("/v1/completions", prompt, headers=ACCEPTED)
            assert reply.status == 200, reply.body
            assert "x-kvrouter-prefill-worker" in reply.headers


async def test_picker_sets_accept_encoding_to_identity() -> None:
    async with scripted_worker() as worker, picker(worker.url) as (side, port), channel_to(port) as channel:
        stream = await PickerUnderTest(side, channel, [worker.url]).sent(headers=ACCEPTED.items())
        head = await stream.receive()
        assert set_headers(head.request_headers.response.header_mutation)["accept-encoding"] == "identity"
        await stream.receive()
        await stream.finish()
