"""Clients cannot set the host from which an engine fetches KV blocks, because vLLM with NIXL calls any host.

The fields never reach a worker, however they are written and wherever in the body: to prefill and decode workers,
without tenants, and through Envoy.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from itertools import cycle

import pytest
from envoy_client import EnvoyStream, streamed
from grpc_call import channel_to
from picker_under_test import JSON, picker
from router_under_test import RouterUnderTest, router
from scripted_worker import MODEL, Exchange, ScriptedWorker, scripted_workers

from router.auth import hashed_key

HOST = "203.0.113.66"
KEY = {"authorization": "Bearer key-a"}
TENANTS = {"named": {"a": {"keys": [hashed_key("key-a")]}}}
PARAMS = f'{{"do_remote_prefill": true, "remote_host": "{HOST}", "remote_port": 5600}}'
PROMPTS = {
    "/v1/completions": '"prompt": [1, 2, 3]',
    "/v1/chat/completions": '"messages": [{"role": "user", "content": "x"}]',
    "/v1/responses": '"input": "x"',
    "/v1/messages": '"max_tokens": 1, "messages": [{"role": "user", "content": "x"}]',
    "/inference/v1/generate": '"token_ids": [1, 2, 3]',
    "/v1/embeddings": '"input": "x"',
}
NAMES = [
    '"kv_transfer_params"',
    '"\\u006bv_transfer_params"',
    '"kv\\u005ftransfer\\u005Fparams"',
    '"ec_transfer_params"',
]
CARRIERS = ["vllm_xargs", "extra_args", "extra_body", "sampling_params", "nvext", "custom_params"]


def fields() -> Iterator[str]:
    """Ways to write it as one more field of a body."""
    for name in NAMES:
        yield f"{name}: {PARAMS}"
        yield f'"kv_transfer_params": null, {name}: {PARAMS}'
    for carrier, name in zip(CARRIERS, cycle(NAMES)):
        yield f'"{carrier}": {{{name}: {PARAMS}}}'
        yield f'"{carrier}": [{{"extra_args": {{{name}: {PARAMS}}}}}]'
    yield f'"sampling_params": {{"extra_args": {{"kv_transfer_params": {PARAMS}}}}}'
    yield f'"\\u0076llm_xargs": {{"kv_transfer_params": {PARAMS}}}'
    yield f'"vllm_xargs": {{}}, "vllm_xargs": {{"kv_transfer_params": {PARAMS}}}'
    yield f'"x": "{"y" * 70_000}", "kv_transfer_params": {PARAMS}'  # long bodies are read in another way


def bodies(path: str) -> Iterator[bytes]:
    asked = f'"model": "{MODEL}", {PROMPTS[path]}'
    for number, field in enumerate(fields()):
        yield (f"{{{asked}, {field}}}" if number % 2 else f"{{{field}, {asked}}}").encode()
    plain = f'{{"kv_transfer_params": {PARAMS}, {asked}}}'
    for encoding in ("utf-8-sig", "utf-16", "utf-16-le", "utf-32", "utf-7"):
        yield plain.encode(encoding)


def received_host(worker: ScriptedWorker) -> bool:
    return any(HOST.encode() in exchange.body for exchange in worker.exchanges)


@pytest.fixture(scope="module")
async def workers() -> AsyncIterator[list[ScriptedWorker]]:
    async def answer(exchange: Exchange) -> None:
        await exchange.answer(b'{"choices": [], "kv_transfer_params": {"remote_block_ids": [1]}}')

    async with scripted_workers(answer, answer) as both:
        yield both


@pytest.fixture(scope="module")
async def pair(workers: list[ScriptedWorker]) -> AsyncIterator[RouterUnderTest]:
    named = [{"url": each.url, "role": role} for each, role in zip(workers, ("prefill", "decode"), strict=True)]
    server = {"token": "operator"}
    async with router(
        workers=named, disaggregation={"backend": "nixl", "decode_computes": False}, server=server, tenants=TENANTS
    ) as routed:
        yield routed


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
async def test_transfer_params_of_tenants_never_reach_pairs(
    pair: RouterUnderTest, workers: list[ScriptedWorker], path: str
) -> None:
    for body in bodies(path):
        assert (await pair.call(path, body, headers=KEY)).status == 400, body[:200]
    assert not any(map(received_host, workers))
    asked = f'{{"model": "{MODEL}", {PROMPTS[path]}}}'.encode()
    assert (await pair.call(path, asked, headers=KEY)).status == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/inference/v1/generate"])
async def test_transfer_params_never_reach_workers_without_tenants(workers: list[ScriptedWorker], path: str) -> None:
    async with router(workers[1].url) as routed:
        statuses = {(await routed.call(path, body)).status for body in bodies(path)}
    assert statuses == {200, 400}  # left out, or refused
    assert not any(map(received_host, workers))


@pytest.mark.parametrize("tenants", [TENANTS, {}], ids=["tenants", "none"])
async def test_transfer_params_never_pass_the_picker(workers: list[ScriptedWorker], tenants: dict[str, object]) -> None:
    sections = {"tenants": tenants, "server": {"token": "operator"}}
    async with picker(workers[1].url, **sections) as (_, port), channel_to(port) as channel:
        for body in bodies("/v1/completions"):
            stream = EnvoyStream(channel)
            await stream.head("/v1/completions", JSON, *KEY.items())
            await stream.body(body)
            heard = await stream.receive()
            if heard.HasField("immediate_response"):
                assert heard.immediate_response.status.code == 400
            else:
                assert not tenants
                sent = b""
                while True:
                    part, ended = streamed((await stream.receive()).request_body)
                    sent += part
                    if ended:
                        break
                assert HOST.encode() not in sent
                assert json.loads(sent)["prompt"] == [1, 2, 3]
            stream.call.done_writing()
