"""The openai and anthropic clients through the router, on every route that a simulated worker answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import count
from typing import TYPE_CHECKING, Any

import openai
import pytest
from router_under_test import Reply, RouterUnderTest, router, until
from scripted_worker import MODEL as SCRIPTED
from scripted_worker import Exchange, scripted_worker, scripted_workers
from simulated_workers import simulated_workers

from simulator.worker import SimulatedWorkerSettings

if TYPE_CHECKING:  # its import takes a second, which only the process of these tests needs
    import anthropic

MODEL, ADAPTER, BLOCK = "simulated", "poet", 16

numbers = count()


@pytest.fixture(scope="module")
async def routed() -> AsyncIterator[RouterUnderTest]:
    """A router whose predictions come from the workers' events alone."""
    async with (
        simulated_workers(2, adapters=(ADAPTER,)) as urls,
        router(*urls, constants={"linger": 0}) as routed,
    ):
        await routed.until_live()
        yield routed


@pytest.fixture
async def claude(routed: RouterUnderTest) -> AsyncIterator[anthropic.AsyncAnthropic]:
    import anthropic

    async with anthropic.AsyncAnthropic(base_url=routed.url, api_key="none", max_retries=0, timeout=20) as client:
        yield client


def text() -> str:
    """Some 100 tokens that no other text of these tests begins with."""
    number = next(numbers)
    return f"{number} begins. " + " ".join(f"word {number} {place}" for place in range(30))


async def sent_again(routed: RouterUnderTest, path: str, body: dict[str, Any]) -> Reply:
    """The answer to a request that was sent before, once the router knows what the worker holds of it."""
    first = await routed.call(path, body)
    assert first.status == 200, first.body

    async def known() -> bool:
        answer = await routed.call("/explain", {"path": path, "request": body})
        return bool(answer.json()["candidates"][0]["overlap"])

    await until(known)
    second = await routed.call(path, body)
    assert second.worker == first.worker
    assert second.overlap >= 4 * BLOCK
    return second


# /v1/responses


async def test_streamed_response_equals_whole_response(routed: RouterUnderTest) -> None:
    prompt = text()
    whole = await routed.openai.responses.create(
        model=MODEL, input=prompt, instructions="Be brief.", max_output_tokens=8
    )
    assert whole.output_text
    assert whole.usage is not None
    assert whole.usage.output_tokens == 8
    pieces, final = [], None
    stream = await routed.openai.responses.create(
        model=MODEL, input=prompt, instructions="Be brief.", max_output_tokens=8, stream=True
    )
    async for event in stream:
        if event.type == "response.output_text.delta":
            pieces.append(event.delta)
        elif event.type in ("response.completed", "response.incomplete"):
            final = event.response
    assert "".join(pieces) == whole.output_text
    assert final is not None
    assert final.output_text == whole.output_text


async def test_repeated_response_hits_cache(routed: RouterUnderTest) -> None:
    body = {
        "model": MODEL,
        "instructions": text(),
        "input": [{"role": "user", "content": "hi"}],
        "max_output_tokens": 2,
    }
    again = await sent_again(routed, "/v1/responses", body)
    assert again.json()["usage"]["input_tokens_details"]["cached_tokens"] == again.overlap


async def test_following_response_is_sent_to_the_same_worker(routed: RouterUnderTest) -> None:
    for stream in (False, True, False, True):
        first = await routed.openai.responses.with_raw_response.create(
            model=MODEL, input=text(), max_output_tokens=4, stream=stream
        )
        if stream:
            events = [event async for event in first.parse()]
            name = events[-1].response.id
        else:
            name = first.parse().id
        following = await routed.openai.responses.with_raw_response.create(
            model=MODEL, input="And?", previous_response_id=name, max_output_tokens=4
        )
        assert following.headers["x-kvrouter-worker"] == first.headers["x-kvrouter-worker"]
        assert following.parse().previous_response_id == name
        assert (await routed.openai.responses.retrieve(name)).id == name


async def test_unknown_response_is_404(routed: RouterUnderTest) -> None:
    with pytest.raises(openai.NotFoundError):
        await routed.openai.responses.create(model=MODEL, input="hi", previous_response_id="resp_none")
    with pytest.raises(openai.NotFoundError):
        await routed.openai.responses.retrieve("resp_none")


# /v1/messages


async def test_streamed_message_equals_whole_message(routed: RouterUnderTest, claude: anthropic.AsyncAnthropic) -> None:
    prompt: list[anthropic.types.MessageParam] = [{"role": "user", "content": text()}]
    whole = await claude.messages.create(model=MODEL, max_tokens=8, system="Be brief.", messages=prompt)
    (block,) = whole.content
    assert block.type == "text"
    assert whole.stop_reason == "max_tokens"
    async with claude.messages.stream(model=MODEL, max_tokens=8, system="Be brief.", messages=prompt) as stream:
        assert await stream.get_final_text() == block.text
        final = await stream.get_final_message()
    assert final.usage.output_tokens == whole.usage.output_tokens == 8
    assert await routed.requests_in_flight() == 0


async def test_repeated_message_hits_cache(routed: RouterUnderTest) -> None:
    tool = {"name": "weather", "description": "Says it", "input_schema": {"type": "object", "properties": {}}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "weather", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "sun"}]},
    ]
    body = {"model": MODEL, "system": text(), "messages": turns, "tools": [tool], "max_tokens": 2}
    again = await sent_again(routed, "/v1/messages", body)
    assert again.json()["usage"]["cache_read_input_tokens"] == again.overlap


async def test_count_tokens_counts_message(claude: anthropic.AsyncAnthropic) -> None:
    counted = await claude.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": text()}])
    assert counted.input_tokens > 50


async def test_anthropic_client_raises_typed_errors(routed: RouterUnderTest, claude: anthropic.AsyncAnthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="does not exist") as unknown:
        await claude.messages.create(model="nobody", max_tokens=1, messages=[{"role": "user", "content": "hi"}])
    body = unknown.value.body
    assert isinstance(body, dict)
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    with pytest.raises(anthropic.BadRequestError, match="messages"):
        await claude.messages.create(model=MODEL, max_tokens=1, messages=[])
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        await claude.messages.create(model=MODEL, max_tokens=0, messages=[{"role": "user", "content": "hi"}])
    assert (await routed.call("/v1/messages", b"{")).json()["type"] == "error"


async def test_broken_message_stream_raises_error() -> None:
    import anthropic

    async def script(exchange: Exchange) -> None:
        await exchange.begin_chunks()
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a"}}
        await exchange.chunk(b"event: content_block_delta\ndata: %b\n\n" % json.dumps(delta).encode())
        await exchange.hang_up()

    async with (
        scripted_worker(script) as worker,
        router(worker.url) as routed,
        anthropic.AsyncAnthropic(base_url=routed.url, api_key="none", max_retries=0) as claude,
    ):
        stream = await claude.messages.create(
            model=SCRIPTED, max_tokens=1, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        with pytest.raises(anthropic.APIStatusError, match="broke off"):
            _ = [event async for event in stream]


# What else a worker has


@pytest.mark.parametrize("field", ["text", "input_ids"])
async def test_repeated_generate_hits_cache(routed: RouterUnderTest, field: str) -> None:
    prompt: Any = text()
    if field == "input_ids":
        prompt = (await routed.call("/tokenize", {"model": MODEL, "prompt": prompt})).json()["tokens"]
    again = await sent_again(routed, "/generate", {field: prompt, "sampling_params": {"max_new_tokens": 2}})
    assert again.json()["meta_info"]["cached_tokens"] == again.overlap


async def test_embeddings_are_deterministic(routed: RouterUnderTest) -> None:
    made = await routed.openai.embeddings.create(model=MODEL, input=["one", "two", "one"])
    vectors = [each.embedding for each in made.data]
    assert vectors[0] == vectors[2] != vectors[1]
    floats = await routed.openai.embeddings.create(model=MODEL, input="one", encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(vectors[0], rel=1e-6)


async def test_rerank_and_score_are_forwarded(routed: RouterUnderTest) -> None:
    documents = ["the sun shines", "a cache holds blocks"]
    ranked = await routed.call("/v1/rerank", {"model": MODEL, "query": "a cache of blocks", "documents": documents})
    assert [result["index"] for result in ranked.json()["results"]] == [1, 0]
    scored = await routed.call("/v1/score", {"model": MODEL, "text_1": documents[0], "text_2": documents})
    assert scored.json()["data"][0]["score"] == pytest.approx(1.0)


async def test_detokenize_inverts_tokenize(routed: RouterUnderTest) -> None:
    tokens = (await routed.call("/tokenize", {"model": MODEL, "prompt": "there and back"})).json()["tokens"]
    assert (await routed.call("/detokenize", {"model": MODEL, "tokens": tokens})).json() == {"prompt": "there and back"}


async def test_adapter_returns_several_choices(routed: RouterUnderTest) -> None:
    messages: list[Any] = [{"role": "user", "content": text()}]
    answer = await routed.openai.chat.completions.create(model=ADAPTER, messages=messages, n=3, max_tokens=4)
    assert len(answer.choices) == 3


async def test_transcription_is_sent_to_worker_of_its_model() -> None:
    async def script(exchange: Exchange) -> None:
        assert b"RIFF" * 5000 in exchange.body
        await exchange.answer(b'{"text": "hello"}', headers=b"content-type: application/json\r\n")

    async with scripted_worker(script) as worker, router(worker.url) as routed:
        sound = ("speech.wav", b"RIFF" * 5000)
        transcription = await routed.openai.audio.transcriptions.create(model=SCRIPTED, file=sound)
        assert transcription.text == "hello"
        with pytest.raises(openai.NotFoundError) as unknown:
            await routed.openai.audio.transcriptions.create(model="nobody", file=sound)
        assert unknown.value.param == "model"


async def test_conversation_about_image_stays_with_its_worker() -> None:
    answer = json.dumps({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 1}}).encode()

    async def script(exchange: Exchange) -> None:
        await exchange.answer(answer)

    models = {SCRIPTED: {"tokenizer": SimulatedWorkerSettings().tokenizer}}
    async with (
        scripted_workers(*[script] * 3) as workers,
        router(*(worker.url for worker in workers), models=models) as routed,
    ):
        await routed.until_tokenizers_are_tried()
        workers_by_picture: dict[str, set[str]] = {}
        for _ in range(3):
            for picture in ("data:,one", "data:,two"):
                parts = [
                    {"type": "image_url", "image_url": {"url": picture}},
                    {"type": "text", "text": "What do you see? " * 10},
                ]
                body = {"model": SCRIPTED, "messages": [{"role": "user", "content": parts}]}
                workers_by_picture.setdefault(picture, set()).add(
                    (await routed.call("/v1/chat/completions", body)).worker
                )
        assert [len(urls) for urls in workers_by_picture.values()] == [1, 1]


# /v1/models


async def test_models_are_listed_and_retrieved(routed: RouterUnderTest) -> None:
    listed = {model.id: model async for model in await routed.openai.models.list()}
    assert set(listed) == {MODEL, ADAPTER}
    one = await routed.openai.models.retrieve(ADAPTER)
    assert one == listed[ADAPTER]
    assert one.model_dump()["parent"] == MODEL
    assert one.model_dump()["max_model_len"] == SimulatedWorkerSettings().max_model_len
    with pytest.raises(openai.NotFoundError, match="simulated"):
        await routed.openai.models.retrieve("org/nobody")
    assert (await routed.call("/v1/models/no%0Aname")).status == 400  # no canonical path


# Bad input, wherever it is sent

BAD: list[tuple[str, Any, int, str]] = [
    ("/v1/responses", {"model": MODEL}, 400, "input"),
    ("/v1/responses", {"model": "nobody", "input": "hi"}, 404, "model"),
    ("/v1/messages", {"model": MODEL, "messages": "hi", "max_tokens": 1}, 400, "messages"),
    (
        "/v1/messages",
        {"model": "nobody", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
        404,
        "nobody",
    ),
    ("/v1/messages/count_tokens", {"model": MODEL}, 400, "messages"),
    ("/v1/embeddings", {"model": MODEL}, 400, "input"),
    ("/v1/embeddings", {"model": 5, "input": "hi"}, 400, "model"),
    ("/v1/rerank", {"model": MODEL, "documents": []}, 400, "query"),
    ("/v1/score", {"model": MODEL, "text_1": "a"}, 400, "text_2"),
    ("/tokenize", {"model": MODEL}, 400, "prompt"),
    ("/tokenize", {"model": "nobody", "prompt": "hi"}, 404, "model"),
    ("/detokenize", {"model": MODEL}, 400, "tokens"),
    ("/generate", {}, 400, "text"),
    ("/generate", {"input_ids": ["a"]}, 400, "input_ids"),
    ("/explain", {"path": "/v1/completions"}, 400, "request"),
    ("/explain", {"request": {}, "path": 5}, 400, "path"),
    ("/explain", {"request": {"messages": []}}, 400, "model"),
]


@pytest.mark.parametrize(("path", "body", "status", "field"), BAD)
async def test_invalid_request_names_the_field(
    routed: RouterUnderTest, path: str, body: Any, status: int, field: str
) -> None:
    reply = await routed.call(path, body)
    assert reply.status == status
    assert field in (reply.error.get("param") or "") or field in reply.error["message"]
    assert (reply.json().get("type") == "error") == path.startswith("/v1/messages")
