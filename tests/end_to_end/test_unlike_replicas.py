"""Replicas of one model with unlike contexts or abilities: each request is sent to a worker that accepts it."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from router_under_test import RouterUnderTest, router
from scripted_worker import Exchange, scripted_worker

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running

FAST: dict[str, Any] = {"base_step_s": 0.001, "prefill_s_per_token": 0.0, "decode_s_per_sequence": 0.0}
SHORT, LONG = 512, 16384
POLICIES = ["kv_aware", "round_robin", "least_loaded", "random"]


def worker(length: int) -> SimulatedWorkerSettings:
    return SimulatedWorkerSettings(max_model_len=length, **FAST)


def completion(tokens: int, first: int = 0, max_tokens: int = 1) -> dict[str, Any]:
    return {"model": "simulated", "prompt": [first + each for each in range(tokens)], "max_tokens": max_tokens}


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_long_prompt_goes_to_the_replica_with_a_long_context(policy: str) -> None:
    async with (
        running(worker(SHORT)) as short,
        running(worker(LONG)) as long,
        router(short, long, policy={"name": policy}) as routed,
    ):
        asked = [completion(2000, first) for first in range(12)]
        replies = await asyncio.gather(*(routed.call("/v1/completions", body) for body in asked))
        assert {reply.status for reply in replies} == {200}
        assert {reply.worker for reply in replies} == {long}
        small = await asyncio.gather(*(routed.call("/v1/completions", completion(40, each)) for each in range(20)))
        assert {reply.status for reply in small} == {200}
        assert short in {reply.worker for reply in small}
        (card,) = (await routed.call("/v1/models")).json()["data"]
        assert card["max_model_len"] == LONG


async def test_the_engine_refuses_a_prompt_that_fits_no_worker() -> None:
    async with running(worker(SHORT)) as short, running(worker(LONG)) as long, router(short, long) as routed:
        reply = await routed.call("/v1/completions", completion(1000) | {"prompt": list(range(1000)) * 17})
        assert (reply.status, reply.worker) == (400, long)
        assert "maximum context length" in reply.json()["error"]["message"]


async def test_requests_that_fit_a_free_replica_do_not_wait_behind_one_that_does_not() -> None:
    slow = SimulatedWorkerSettings(max_model_len=LONG, base_step_s=0.05, prefill_s_per_token=0.0)
    admission = {"requests": 1, "timeout": 60.0}
    async with (
        running(worker(SHORT)) as short,
        running(slow) as long,
        router(short, long, admission=admission) as routed,
    ):
        holding = asyncio.create_task(routed.call("/v1/completions", completion(2000, 0, 10_000)))
        waiting = asyncio.create_task(routed.call("/v1/completions", completion(2000, 5, 1)))
        await routed.until_queued(1)
        for each in range(5):
            reply = await routed.call("/v1/completions", completion(40, each))
            assert (reply.status, reply.worker) == (200, short)
        assert not waiting.done()
        holding.cancel()
        assert (await waiting).worker == long


async def test_the_output_that_a_request_asks_for_counts() -> None:
    async with running(worker(SHORT)) as short, running(worker(LONG)) as long, router(short, long) as routed:
        asked = [completion(400, each, 200) for each in range(8)]
        replies = await asyncio.gather(*(routed.call("/v1/completions", body) for body in asked))
        assert {(reply.status, reply.worker) for reply in replies} == {(200, long)}


@pytest.mark.parametrize("policy", POLICIES)
async def test_a_prompt_of_unknown_length_is_tried_on_a_longer_replica(policy: str) -> None:
    """The estimate of its length is too low: each character is a token."""

    def of_length(length: int) -> Any:
        async def script(exchange: Exchange) -> None:
            if exchange.target == "/v1/models":
                await exchange.answer(json.dumps({"data": [{"id": "m", "max_model_len": length}]}).encode())
            elif exchange.target != "/v1/completions":
                await exchange.answer(status="404 Not Found")
            elif len(json.loads(exchange.body)["prompt"]) > length:
                await exchange.answer(b'{"error": {"message": "maximum context length"}}', "400 Bad Request")
            else:
                await exchange.answer()

        return script

    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(scripted_worker(of_length(each))) for each in (SHORT, LONG)]
        for each in workers:
            each.answers_discovery = False
        urls = [each.url for each in workers]
        routed = await stack.enter_async_context(router(*urls, policy={"name": policy}))
        for each in range(8):
            body = {"model": "m", "prompt": f"{each}" * 1000, "max_tokens": 1}
            assert (await routed.call("/v1/completions", body)).status == 200


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, **more}


def with_part(**part: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": [part]}])


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
# By the field in which an SGLang server reports that it lacks an ability: its value, and a request for the ability.
REPORTED: dict[str, tuple[Any, dict[str, Any]]] = {
    "has_image_understanding": (False, with_part(type="image_url", image_url={"url": "data:image/png;base64,AA=="})),
    "has_audio_understanding": (False, with_part(type="input_audio", input_audio={"data": "AA==", "format": "wav"})),
    "tool_call_parser": (None, chat(tools=TOOLS)),
    "grammar_backend": ("none", chat(response_format={"type": "json_object"})),
}


class Sglang:
    """A server that reports fields as SGLang does, and answers every request with the same response."""

    def __init__(self, answer: bytes = b"{}", status: str = "200 OK", **reported: Any) -> None:
        self.info = {"has_image_understanding": True, "has_audio_understanding": True} | reported
        self.server = {"tool_call_parser": "qwen", "grammar_backend": "xgrammar"} | reported
        self.response = answer, status
        self.requests = 0

    async def answer(self, exchange: Exchange) -> None:
        if exchange.target == "/v1/models":
            await exchange.answer(b'{"data": [{"id": "m"}]}')
        elif exchange.target == "/server_info":
            await exchange.answer(json.dumps(self.server).encode())
        elif exchange.target == "/get_model_info":
            await exchange.answer(json.dumps(self.info).encode())
        elif exchange.target != "/v1/chat/completions":
            await exchange.answer(status="404 Not Found")
        elif b"tools" not in exchange.body:
            self.requests += 1
            await exchange.answer()
        else:
            self.requests += 1
            await exchange.answer(*self.response)


async def before(stack: AsyncExitStack, *servers: Sglang, policy: str = "round_robin") -> RouterUnderTest:
    urls = []
    for server in servers:
        worker = await stack.enter_async_context(scripted_worker(server.answer))
        worker.answers_discovery = False
        urls.append(worker.url)
    return await stack.enter_async_context(router(*urls, policy={"name": policy}))


@pytest.mark.parametrize("policy", ["kv_aware", "round_robin"])
@pytest.mark.parametrize("field", REPORTED)
async def test_a_request_goes_to_a_replica_that_reports_its_ability(policy: str, field: str) -> None:
    value, body = REPORTED[field]
    async with AsyncExitStack() as stack:
        servers = Sglang(**{field: value}), Sglang()
        routed = await before(stack, *servers, policy=policy)
        for _ in range(6):
            assert (await routed.call("/v1/chat/completions", body)).status == 200
        assert [server.requests for server in servers] == [0, 6]
        for request, candidates in ((body, 1), (chat(response_format={"type": "text"}), 2)):
            explained = await routed.call("/explain", {"request": request})
            assert len(explained.json()["candidates"]) == candidates


REFUSAL = b'{"error": {"message": "\\"auto\\" tool choice requires --enable-auto-tool-choice and --tool-call-parser"}}'


async def test_a_replica_that_refused_an_ability_is_not_asked_for_it_again() -> None:
    async with AsyncExitStack() as stack:
        servers = Sglang(REFUSAL, "400 Bad Request"), Sglang()
        routed = await before(stack, *servers)
        for _ in range(8):
            assert (await routed.call("/v1/chat/completions", chat(tools=TOOLS))).status == 200
        assert [server.requests for server in servers] == [1, 8]


async def test_the_engine_refuses_an_ability_that_no_replica_has() -> None:
    async with AsyncExitStack() as stack:
        servers = [Sglang(REFUSAL, "400 Bad Request") for _ in range(2)]
        routed = await before(stack, *servers)
        for _ in range(3):
            reply = await routed.call("/v1/chat/completions", chat(tools=TOOLS))
            assert (reply.status, reply.body) == (400, REFUSAL)
        assert sum(server.requests for server in servers) == 4
