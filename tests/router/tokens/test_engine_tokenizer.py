"""Asking engines about prompts: the same ids as a tokenizer at hand gives, spread over workers, kept by messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import aiohttp.test_utils
import aiohttp.web
import msgspec
import pytest
from played_engine import PlayedEngine

from router.apis.endpoints import read_request
from router.apis.requests import ChatPrompt, TextPrompts, Truncation
from router.tokens import TokenizerUnavailableError
from router.tokens.engine_client import EngineClient, NotOfferedError, PromptRefusedError
from router.tokens.engine_tokenizer import MAX_ASKED, EngineTokenizer
from router.tokens.local_tokenizer import LocalTokenizer

USER = {"role": "user", "content": "What holds the cache?"}
ANSWER = {"role": "assistant", "content": "The worker does."}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}]


@pytest.fixture
async def engines(local: LocalTokenizer) -> AsyncIterator[list[PlayedEngine]]:
    async with PlayedEngine(local).serving() as one, PlayedEngine(local).serving() as other:
        yield [one, other]


@pytest.fixture
def spread(engines: list[PlayedEngine], session: aiohttp.ClientSession) -> EngineTokenizer:
    """The tokenizer that calls both engines."""
    return EngineTokenizer(EngineClient(session, "m"), lambda: [each.url for each in engines], 2**20)


def sent(path: str, **fields: Any) -> ChatPrompt:
    """Return the prompt that the router reads from a request."""
    prompt = read_request("POST", path, [], msgspec.json.encode({"model": "an-adapter"} | fields)).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


PROMPTS = [
    TextPrompts(["the cache"]),
    TextPrompts([" a", "b c", "漢字 <|im_end|>"]),
    ChatPrompt([USER]),
    ChatPrompt([USER], add_generation_prompt=False),
    ChatPrompt([USER, ANSWER], add_generation_prompt=False, continue_final_message=True),
    ChatPrompt([USER], tools=TOOLS),
    ChatPrompt([{"role": "user", "content": [{"type": "text", "text": "é"}]}]),
]


@pytest.mark.parametrize("renders", [True, False])
@pytest.mark.parametrize("prompt", PROMPTS)
async def test_engine_tokenizes_prompts_like_the_router(
    local: LocalTokenizer, asker: EngineTokenizer, engine: PlayedEngine, prompt: ChatPrompt | TextPrompts, renders: bool
) -> None:
    engine.renders = renders
    answer = await asker.tokenize(prompt)
    assert answer.exact
    assert answer.prompts == local.tokenize(prompt)


async def test_request_is_rendered_unchanged(
    local: LocalTokenizer, asker: EngineTokenizer, engine: PlayedEngine
) -> None:
    body = {"system": "Be brief.", "messages": [USER], "max_tokens": 5, "stream": True, "thinking": {"type": "x"}}
    prompt = sent("/v1/messages", **body)
    assert (await asker.tokenize(prompt)).prompts == local.tokenize(prompt)
    assert engine.asked == {"/v1/messages/render": 1}
    del body["stream"]  # of which engines have more to say
    assert engine.bodies == [body | {"model": "m"}]  # not every worker has the adapter


async def test_chat_is_tokenized_with_all_fields_that_change_its_text(
    asker: EngineTokenizer, engine: PlayedEngine
) -> None:
    engine.renders = False
    chat = ChatPrompt(
        [USER],
        tools=TOOLS,
        documents=[{"text": "d"}],
        reasoning_effort="low",
        chat_template_kwargs={"color": "red"},
        add_special_tokens=True,
    )
    await asker.tokenize(chat)
    variables = {"color": "red", "documents": [{"text": "d"}], "reasoning_effort": "low", "enable_thinking": True}
    flags = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": True}
    prompt = {"model": "m", "messages": [USER], "tools": TOOLS}
    assert engine.bodies[-1] == prompt | {"chat_template_kwargs": variables} | flags


async def test_router_truncates_what_tokenize_does_not(
    local: LocalTokenizer, asker: EngineTokenizer, engine: PlayedEngine
) -> None:
    engine.renders = False
    (whole,) = local.tokenize(ChatPrompt([USER]))
    (cut,) = (await asker.tokenize(ChatPrompt([USER], truncation=Truncation(3)))).prompts
    assert list(cut) == list(whole)[-3:]


async def test_equal_prompts_cause_one_call(asker: EngineTokenizer, engine: PlayedEngine) -> None:
    first, again = ChatPrompt([USER, ANSWER, USER]), ChatPrompt([USER, ANSWER, USER])
    assert asker.cached(first) is None
    answer = await asker.tokenize(first)
    assert (await asker.tokenize(again)).prompts is answer.prompts
    assert asker.cached(again) is answer.prompts
    assert engine.asked.total() == 1
    for other in (ChatPrompt([USER, ANSWER, USER], tools=TOOLS), ChatPrompt([USER])):
        assert asker.cached(other) is None
    asker.forget()
    assert asker.cached(again) is None
    assert asker.cached_bytes == 0


async def test_next_turn_has_at_least_the_tokens_of_the_previous_turn(
    asker: EngineTokenizer, engine: PlayedEngine
) -> None:
    earlier = await asker.tokenize(ChatPrompt([USER]))
    engine.refusals["/v1/chat/completions/render"] = 503
    answer = await asker.tokenize(ChatPrompt([USER, ANSWER, USER]))
    assert not answer.exact
    assert answer.prompts == earlier.prompts
    with pytest.raises(TokenizerUnavailableError, match="503"):
        await asker.tokenize(ChatPrompt([ANSWER, USER]))


async def test_hashes_of_the_previous_turn_are_reused(asker: EngineTokenizer) -> None:
    long = USER | {"content": "What holds the cache of this prefix? " * 50}
    (earlier,) = (await asker.tokenize(ChatPrompt([long]))).prompts
    hashes = earlier.hashes(7, 16, len(earlier) // 16)
    (later,) = (await asker.tokenize(ChatPrompt([long, ANSWER, USER]))).prompts
    taken = later.hash_bytes // 8
    assert len(hashes) - 3 <= taken <= len(hashes)
    assert later.hashes(7, 16, 0)[:taken] == hashes[:taken]


async def test_calls_are_spread_over_the_workers(spread: EngineTokenizer, engines: list[PlayedEngine]) -> None:
    await asyncio.gather(*(spread.tokenize(TextPrompts([f"prompt {number}"])) for number in range(12)))
    assert [engine.asked.total() for engine in engines] == [6, 6]


async def test_next_worker_is_called_when_one_does_not_answer(
    local: LocalTokenizer, spread: EngineTokenizer, engines: list[PlayedEngine]
) -> None:
    engines[0].refusals = dict.fromkeys(("/v1/completions/render", "/tokenize"), 500)
    for number in range(4):
        prompt = TextPrompts([f"prompt {number}"])
        assert (await spread.tokenize(prompt)).prompts == local.tokenize(prompt)


async def test_refusal_by_a_worker_is_no_answer(spread: EngineTokenizer, engines: list[PlayedEngine]) -> None:
    with pytest.raises(PromptRefusedError, match="continue_final_message"):
        await spread.tokenize(ChatPrompt([USER], continue_final_message=True))
    assert sum(engine.asked.total() for engine in engines) == 1  # the other would say the same


async def test_waiting_calls_are_limited(asker: EngineTokenizer, engine: PlayedEngine) -> None:
    engine.hangs = True
    asked = [asyncio.ensure_future(asker.tokenize(TextPrompts([f"prompt {number}"]))) for number in range(MAX_ASKED)]
    await asyncio.sleep(0)
    with pytest.raises(TokenizerUnavailableError, match="already waiting"):
        await asker.tokenize(TextPrompts(["one more"]))
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_redirect_of_a_worker_is_not_followed(asker: EngineTokenizer, engine: PlayedEngine) -> None:
    engine.refusals = dict.fromkeys(("/v1/chat/completions/render", "/tokenize"), 307)
    with pytest.raises(NotOfferedError):
        await asker.tokenize(ChatPrompt([USER]))
    assert "/elsewhere" not in engine.asked


async def test_missing_endpoint_is_not_called_again(asker: EngineTokenizer, engine: PlayedEngine) -> None:
    engine.renders = False
    for number in range(3):
        await asker.tokenize(TextPrompts([f"prompt {number}"]))
    assert engine.asked == {"/v1/completions/render": 1, "/tokenize": 3}


@pytest.mark.parametrize(
    ("status", "body", "phrase"),
    [
        (200, b'{"tokens": "abc"}', "invalid answer"),
        (200, b'{"tokens": [1, -1]}', "invalid answer"),
        (200, b'{"tokens": [4294967296]}', "invalid answer"),
        (200, b"<html>", "invalid answer"),
        (401, b"", "status 401"),
        (500, b"oh no", "status 500"),
    ],
)
async def test_invalid_answers_leave_token_ids_unknown(
    session: aiohttp.ClientSession, status: int, body: bytes, phrase: str
) -> None:
    async def answer(_: aiohttp.web.Request) -> aiohttp.web.Response:
        return aiohttp.web.Response(status=status, body=body)

    app = aiohttp.web.Application()
    app.router.add_post("/tokenize", answer)
    async with aiohttp.test_utils.TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        with pytest.raises(TokenizerUnavailableError, match=phrase):
            await EngineClient(session, "m").tokenized(url, TextPrompts(["a"]))


async def test_silent_or_unreachable_engine_leaves_token_ids_unknown(
    engine: PlayedEngine, session: aiohttp.ClientSession
) -> None:
    engine.hangs = True
    with pytest.raises(TokenizerUnavailableError, match="render"):
        await EngineClient(session, "m", timeout_seconds=0.05).rendered(engine.url, TextPrompts(["a"]))
    with pytest.raises(TokenizerUnavailableError, match=r"127\.0\.0\.1:9/tokenize"):
        await EngineClient(session, "m").tokenized("http://127.0.0.1:9", TextPrompts(["a"]))


async def test_what_is_kept_is_bounded(engine: PlayedEngine, session: aiohttp.ClientSession) -> None:
    tokenizer = EngineTokenizer(EngineClient(session, "m"), lambda: [engine.url], 2000)
    for number in range(20):
        await tokenizer.tokenize(TextPrompts([f"prompt {number}"]))
        assert tokenizer.cached_bytes <= 2000
    assert tokenizer.cached(TextPrompts(["prompt 19"])) is not None
    assert tokenizer.cached(TextPrompts(["prompt 0"])) is None


async def test_text_parts_of_responses_are_sent_to_tokenize_in_the_format_of_chats(
    engines: list[PlayedEngine], spread: EngineTokenizer
) -> None:
    for engine in engines:
        engine.renders = False
    parts = [{"type": "input_text", "text": "What holds"}, {"type": "input_text", "text": "the cache?"}]
    await spread.tokenize(sent("/v1/responses", input=[{"role": "user", "content": parts}]))
    bodies = [body for engine in engines for body in engine.bodies if "messages" in body]
    assert [part["type"] for body in bodies for part in body["messages"][0]["content"]] == ["text", "text"]
