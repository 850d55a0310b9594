"""Prompts that a worker refused: none of their tokens counts as cached, because the worker computed nothing."""

from __future__ import annotations

import asyncio
import json

import pytest
from router_under_test import RouterUnderTest, router
from scripted_worker import MODEL, Exchange, scripted_worker

PROMPT = "word " * 2000
ERROR = b'{"error": {"message": "no", "code": 400, "id": "resp_1234567890abcdef"}}'


async def refuse(exchange: Exchange) -> None:
    await exchange.answer(ERROR, status="400 Bad Request")


async def refuse_late(exchange: Exchange) -> None:
    await exchange.send(b"HTTP/1.1 422 Unprocessable Entity\r\ncontent-length: %d\r\n\r\n" % len(ERROR))
    await asyncio.sleep(60)


async def compute(exchange: Exchange) -> None:
    usage = {"prompt_tokens": 2000, "completion_tokens": 1, "total_tokens": 2001}
    await exchange.answer(json.dumps({"usage": usage}).encode())


async def overlap(routed: RouterUnderTest, **more: object) -> int:
    reply = await routed.call("/v1/completions", {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, **more})
    return reply.overlap


@pytest.mark.parametrize("session", [None, "one"])
async def test_a_refused_prompt_is_not_expected_to_be_cached(session: str | None) -> None:
    headers = {} if session is None else {"x-kvrouter-session": session}
    async with scripted_worker(refuse) as worker, router(worker.url) as routed:
        for _ in range(3):
            body = {"model": MODEL, "prompt": PROMPT, "logprobs": 999}
            reply = await routed.call("/v1/completions", body, headers=headers)
            assert (reply.status, reply.overlap) == (400, 0)
        worker.script = compute
        assert await overlap(routed) == 0
        assert await overlap(routed) > 1000
        await routed.until_released()


async def test_a_prompt_is_refused_with_the_head_of_the_response() -> None:
    async with scripted_worker(refuse_late) as worker, router(worker.url) as routed:
        body = {"model": MODEL, "prompt": PROMPT}
        async with routed.request("/v1/completions", body) as late:
            assert late.status == 422
            assert await routed.requests_in_flight() == 0
            worker.script = compute
            assert await overlap(routed) == 0


async def test_a_worker_that_refuses_a_response_does_not_own_it() -> None:
    async with (
        scripted_worker(refuse) as one,
        scripted_worker(refuse) as other,
        router(one.url, other.url, policy={"name": "round_robin"}) as routed,
    ):
        body = {"model": MODEL, "input": "x", "previous_response_id": "resp_1234567890abcdef"}
        workers = {(await routed.call("/v1/responses", body)).worker for _ in range(6)}
        assert workers == {one.url, other.url}
