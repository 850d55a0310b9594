"""Invalid requests: the router and the standalone indexer name the field in OpenAI's error body."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from router_under_test import RouterUnderTest, router
from scripted_worker import MODEL as SCRIPTED
from scripted_worker import Exchange, scripted_worker

from simulator.worker import SimulatedWorkerSettings
from simulator.worker.serve import running
from simulator.worker.settings import BUNDLED_MODEL

MODEL = "simulated"
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
async def routed() -> AsyncIterator[RouterUnderTest]:
    async with running(SimulatedWorkerSettings()) as worker, router(worker) as routed:
        yield routed


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("indexer") / "config.yaml"
    path.write_text(json.dumps({"models": {MODEL: {"tokenizer": str(BUNDLED_MODEL)}}}))
    return path


@pytest.fixture(scope="module")
async def indexer_url(config: Path) -> AsyncIterator[str]:
    """`kvrouter indexer` with a worker of a model that it can tokenize, and one of a model that it cannot."""
    command = [sys.executable, "-m", "kvrouter", "indexer", "--port=0", f"--config={config}"]
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
    assert process.stderr is not None
    listens = re.search(r'listens on ([^\s"]+)', (await process.stderr.readline()).decode())
    assert listens is not None
    url = listens.group(1)
    async with aiohttp.ClientSession() as session:
        for model in (MODEL, "opaque"):
            body = {"endpoint": "tcp://127.0.0.1:1", "modelname": model, "instance_id": "w"}
            async with session.post(f"{url}/register", json=body) as response:
                assert response.status == 201
    yield url
    process.terminate()
    assert await process.wait() == 0


async def refusal(url: str, body: Any) -> tuple[int, str | None]:
    """Post a body, and return the status and the field of its refusal."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.post(url, data=data) as response:
        answer = await response.json()
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert answer["error"]["message"]
        assert answer["error"]["type"] == ("not_found_error" if response.status == 404 else "invalid_request_error")
        return response.status, answer["error"]["param"]


ANY_PROMPT: list[tuple[Any, int, str | None]] = [
    (b"", 400, None),
    (b"model=simulated", 400, None),
    (b'{"model": "simulated", "prompt": "\xff"}', 400, None),
    (b"[" * 100_000, 400, None),
    ([], 400, None),
    ({"prompt": "hi"}, 400, "model"),
    ({"model": None, "prompt": "hi"}, 400, "model"),
    ({"model": 1, "prompt": "hi"}, 400, "model"),
    ({"model": "nobody", "prompt": "hi"}, 404, "model"),
    ({"model": MODEL}, 400, "prompt"),
    ({"model": MODEL, "prompt": ""}, 400, "prompt"),
    ({"model": MODEL, "prompt": []}, 400, "prompt"),
    ({"model": MODEL, "prompt": 5}, 400, "prompt"),
    ({"model": MODEL, "prompt": {"text": "hi"}}, 400, "prompt"),
    ({"model": MODEL, "prompt": ["hi", 5]}, 400, "prompt"),
    ({"model": MODEL, "prompt": [1, -1]}, 400, "prompt"),
    ({"model": MODEL, "prompt": [1, 2**32]}, 400, "prompt"),
    ({"model": MODEL, "prompt": "hi", "cache_salt": ""}, 400, "cache_salt"),
    ({"model": MODEL, "prompt": "hi", "cache_salt": 5}, 400, "cache_salt"),
]
CHAT: list[tuple[Any, int, str | None]] = [
    (b"{", 400, None),
    ({"messages": MESSAGES}, 400, "model"),
    ({"model": "nobody", "messages": MESSAGES}, 404, "model"),
    ({"model": MODEL, "messages": "hi"}, 400, "messages"),
    ({"model": MODEL, "messages": []}, 400, "messages"),
    ({"model": MODEL, "messages": ["hi"]}, 400, "messages[0]"),
    ({"model": MODEL, "messages": [*MESSAGES, {"content": "hi"}]}, 400, "messages[1].role"),
    ({"model": MODEL, "messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
]
MATCH: list[tuple[Any, int, str | None]] = [
    *ANY_PROMPT,
    *CHAT,
    ({"model": MODEL, "prompt": [1, 1_000_000]}, 400, "prompt"),
    ({"model": MODEL, "prompt": "hi", "messages": MESSAGES}, 400, "prompt"),
    ({"model": MODEL, "prompt": "hi", "token_ids": [1]}, 400, "token_ids"),
    ({"model": MODEL, "prompt": ["hi", "you"]}, 400, "prompt"),
    ({"model": MODEL, "prompt": [[1], [2]]}, 400, "prompt"),
    ({"model": MODEL, "token_ids": "hi"}, 400, "token_ids"),
    ({"model": MODEL, "token_ids": []}, 400, "token_ids"),
    ({"model": MODEL, "token_ids": [1, -1]}, 400, "token_ids"),
    ({"model": MODEL, "token_ids": [1, 2**32]}, 400, "token_ids"),
    ({"model": MODEL, "token_ids": [1, 1_000_000]}, 400, "token_ids"),
    ({"model": MODEL, "prompt": "hi", "tenant_id": 5}, 400, "tenant_id"),
    ({"model": MODEL, "prompt": "hi", "lora_name": ""}, 400, "lora_name"),
]


@pytest.mark.parametrize(("body", "status", "param"), ANY_PROMPT)
async def test_invalid_completions_name_the_field(
    routed: RouterUnderTest, body: Any, status: int, param: str | None
) -> None:
    assert await refusal(f"{routed.url}/v1/completions", body) == (status, param)


@pytest.mark.parametrize(("body", "status", "param"), CHAT)
async def test_invalid_chats_name_the_field(routed: RouterUnderTest, body: Any, status: int, param: str | None) -> None:
    assert await refusal(f"{routed.url}/v1/chat/completions", body) == (status, param)


@pytest.mark.parametrize(("body", "status", "param"), MATCH)
async def test_invalid_matches_of_router_name_the_field(
    routed: RouterUnderTest, body: Any, status: int, param: str | None
) -> None:
    assert await refusal(f"{routed.url}/match", body) == (status, param)


@pytest.mark.parametrize(("body", "status", "param"), MATCH)
async def test_invalid_matches_of_indexer_name_the_field(
    indexer_url: str, body: Any, status: int, param: str | None
) -> None:
    assert await refusal(f"{indexer_url}/match", body) == (status, param)


@pytest.mark.parametrize("field", ["prompt", "messages"])
async def test_match_of_model_without_tokenizer_needs_token_ids(indexer_url: str, field: str) -> None:
    body = {"model": "opaque", field: "hi" if field == "prompt" else MESSAGES}
    assert await refusal(f"{indexer_url}/match", body) == (400, field)
    async with aiohttp.ClientSession() as session:
        asked = {"model": "opaque", "token_ids": [1, 2, 3]}
        async with session.post(f"{indexer_url}/match", json=asked) as response:
            assert response.status == 200
            assert [match["worker"] for match in (await response.json())["matches"]] == ["w"]


async def test_openai_client_raises_typed_errors(routed: RouterUnderTest) -> None:
    with pytest.raises(openai.NotFoundError, match=r"'nobody' does not exist\. Send one of: simulated") as unknown:
        await routed.openai.completions.create(model="nobody", prompt="hi")
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as refused:
        await routed.openai.completions.create(model=MODEL, prompt=[10**9])
    assert refused.value.param == "prompt"


async def test_invalid_value_is_refused_by_worker(routed: RouterUnderTest) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens") as refused:
        await routed.openai.completions.create(model=MODEL, prompt="hi", max_tokens=0)
    assert "x-kvrouter-worker" in refused.value.response.headers


async def test_session_name_of_a_megabyte_is_cut_in_a_body_and_refused_in_a_header(routed: RouterUnderTest) -> None:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
    name = "s" * 1_000_000
    before = await sessions(routed)
    for end in "ab":
        assert (await routed.call("/v1/completions", body | {"session_id": name + end})).status == 200
    assert await sessions(routed) == before + 1
    refused = await routed.call("/v1/completions", body, headers={"x-kvrouter-session-id": name})
    assert (refused.status, refused.body) == (400, b"Request header fields too large.")
    assert (await routed.call(f"/finish_session?session_id={name[:600]}", method="POST")).status == 200
    assert await sessions(routed) == before


async def sessions(routed: RouterUnderTest) -> int:
    return int((await routed.health())["sessions"].get(MODEL, {}).get("live", 0))


async def test_unknown_model_is_404_on_embeddings(routed: RouterUnderTest) -> None:
    assert await refusal(f"{routed.url}/v1/embeddings", {"model": "nobody", "input": "hi"}) == (404, "model")


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
    reply = await routed.call("/v1/completions", {"model": SCRIPTED, "prompt": PROMPT, "max_tokens": 1, **more})
    return reply.overlap


@pytest.mark.parametrize("session", [None, "one"])
async def test_a_refused_prompt_is_not_expected_to_be_cached(session: str | None) -> None:
    headers = {} if session is None else {"x-kvrouter-session": session}
    async with scripted_worker(refuse) as worker, router(worker.url) as routed:
        for _ in range(3):
            body = {"model": SCRIPTED, "prompt": PROMPT, "logprobs": 999}
            reply = await routed.call("/v1/completions", body, headers=headers)
            assert (reply.status, reply.overlap) == (400, 0)
        worker.script = compute
        assert await overlap(routed) == 0
        assert await overlap(routed) > 1000
        await routed.until_released()


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"error": {"message": "too long", "code": 400}}\n\n',
        b'data: {"error": {"message": "too long", "type": "BadRequestError"}}\n\n',
        b'event: error\r\ndata: {"type": "error", "error": {"type": "invalid_request_error"}}\r\n\r\n',
        b'data: {"error": {"message": "the engine died", "code": 500}}\n\ndata: [DONE]\n\n',
    ],
)
async def test_a_prompt_is_not_expected_to_be_cached_after_an_error_as_first_event(event: bytes) -> None:
    async def begin_and_refuse(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        await exchange.chunk(event)
        await exchange.chunk(b"")

    async with scripted_worker(begin_and_refuse) as worker, router(worker.url) as routed:
        body = {"model": SCRIPTED, "prompt": PROMPT, "stream": True}
        reply = await routed.call("/v1/completions", body)
        assert (reply.status, reply.body) == (200, event)
        worker.script = compute
        assert await overlap(routed) == 0
        assert await overlap(routed) > 1000
        await routed.until_released()


@pytest.mark.parametrize("status", ["500 Internal Server Error", "503 Service Unavailable"])
async def test_a_prompt_is_not_expected_to_be_cached_after_a_server_error(status: str) -> None:
    async def fail(exchange: Exchange) -> None:
        await exchange.answer(ERROR, status=status)

    async with scripted_worker(fail) as worker, router(worker.url) as routed:
        assert (await routed.call("/v1/completions", {"model": SCRIPTED, "prompt": PROMPT})).status >= 500
        worker.script = compute
        assert await overlap(routed) == 0


async def test_a_prompt_is_refused_with_the_head_of_the_response() -> None:
    async with scripted_worker(refuse_late) as worker, router(worker.url) as routed:
        body = {"model": SCRIPTED, "prompt": PROMPT}
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
        body = {"model": SCRIPTED, "input": "x", "previous_response_id": "resp_1234567890abcdef"}
        workers = {(await routed.call("/v1/responses", body)).worker for _ in range(6)}
        assert workers == {one.url, other.url}
