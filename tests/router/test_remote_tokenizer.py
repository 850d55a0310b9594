"""A worker's /tokenize, played by a server that answers as vLLM does: the same ids as a tokenizer at hand gives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import worker.simulated
from indexer.errors import RequestError
from indexer.hashing import PackedPrompt
from router.apis.requests import ChatPrompt, TextPrompts
from router.errors import TokenizerUnavailableError
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.remote_tokenizer import RemoteTokenizer

USER = {"role": "user", "content": "What holds the cache?"}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(scope="module")
def local() -> LocalTokenizer:
    return LocalTokenizer.load(str(Path(worker.simulated.__file__).parent / "model"))


def tokenize(local: LocalTokenizer) -> Handler:
    async def handler(request: web.Request) -> web.Response:
        body = await request.json()
        assert body.pop("model") == "m"
        special = body.pop("add_special_tokens")
        text = body["prompt"] if "prompt" in body else local.render(ChatPrompt(**body))
        (ids,) = local.encode([text], add_special_tokens=special)
        return web.json_response({"count": len(ids), "max_model_len": 32768, "tokens": list(ids), "token_strs": None})

    return handler


@asynccontextmanager
async def asking(handler: Handler, timeout_seconds: float = 10) -> AsyncIterator[RemoteTokenizer]:
    app = web.Application()
    app.router.add_post("/tokenize", handler)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield RemoteTokenizer(session, str(server.make_url("/")), "m", timeout_seconds)


def ask(handler: Handler, prompt: TextPrompts | ChatPrompt, timeout_seconds: float = 10) -> list[PackedPrompt]:
    async def main() -> list[PackedPrompt]:
        async with asking(handler, timeout_seconds) as remote:
            return await remote.token_ids(prompt)

    return asyncio.run(main())


@pytest.mark.parametrize("texts", [["the cache"], [""], ["a", "b c", "漢字 <|im_end|>"]])
def test_texts_are_tokenized_as_locally(local: LocalTokenizer, texts: list[str]) -> None:
    assert ask(tokenize(local), TextPrompts(texts)) == local.encode(texts, add_special_tokens=True)


@pytest.mark.parametrize(
    "chat",
    [
        ChatPrompt([USER]),
        ChatPrompt([USER], add_generation_prompt=False),
        ChatPrompt(
            [USER, {"role": "assistant", "content": "The "}], add_generation_prompt=False, continue_final_message=True
        ),
        ChatPrompt([USER], tools=[{"type": "function", "function": {"name": "f"}}]),
        ChatPrompt([{"role": "user", "content": [{"type": "text", "text": "é"}]}]),
    ],
)
def test_chats_are_tokenized_as_locally(local: LocalTokenizer, chat: ChatPrompt) -> None:
    assert ask(tokenize(local), chat) == local.encode([local.render(chat)], add_special_tokens=False)


def test_a_chat_is_asked_with_all_that_changes_its_text() -> None:
    asked: list[dict[str, Any]] = []

    async def remember(request: web.Request) -> web.Response:
        asked.append(await request.json())
        return web.json_response({"tokens": [1]})

    chat = ChatPrompt(
        [USER],
        tools=[{"type": "function", "function": {"name": "f"}}],
        documents=[{"text": "d"}],
        reasoning_effort="low",
        chat_template="t",
        chat_template_kwargs={"color": "red"},
        add_special_tokens=True,
    )
    assert ask(remember, chat) == [PackedPrompt.of([1])]
    assert asked == [
        {
            "model": "m",
            "messages": [USER],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "chat_template": "t",
            "chat_template_kwargs": {
                "color": "red",
                "documents": [{"text": "d"}],
                "reasoning_effort": "low",
                "enable_thinking": True,
            },
            "add_generation_prompt": True,
            "continue_final_message": False,
            "add_special_tokens": True,
        }
    ]


@pytest.mark.parametrize("status", [400, 422])
def test_a_refusal_has_the_workers_words(status: int) -> None:
    async def refuse(_: web.Request) -> web.Response:
        error = {"message": "roles must alternate", "type": "BadRequestError", "param": "messages", "code": status}
        return web.json_response({"error": error}, status=status)

    with pytest.raises(RequestError, match="roles must alternate") as caught:
        ask(refuse, ChatPrompt([USER]))
    assert (caught.value.status, caught.value.param) == (status, "messages")


@pytest.mark.parametrize(
    ("status", "body", "phrase"),
    [
        (404, b'{"detail": "Not Found"}', "status 404"),
        (401, b"", "status 401"),
        (500, b"oh no", "status 500"),
        (503, b'{"error": {"message": "sleeping"}}', "status 503"),
        (200, b'{"tokens": "abc"}', "makes no sense"),
        (200, b'{"tokens": [1, -1]}', "makes no sense"),
        (200, b'{"tokens": [4294967296]}', "makes no sense"),
        (200, b"<html>", "makes no sense"),
        (400, b"<html>", "makes no sense"),
    ],
)
def test_other_answers_leave_the_ids_unknown(status: int, body: bytes, phrase: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    with pytest.raises(TokenizerUnavailableError, match=phrase):
        ask(answer, TextPrompts(["a"]))


def test_a_worker_that_does_not_answer_is_not_waited_for() -> None:
    async def hang(_: web.Request) -> web.Response:
        await asyncio.sleep(60)
        raise AssertionError

    with pytest.raises(TokenizerUnavailableError, match="tokenize"):
        ask(hang, TextPrompts(["a"]), timeout_seconds=0.05)


def test_a_worker_that_is_gone_leaves_the_ids_unknown() -> None:
    async def main() -> None:
        async with aiohttp.ClientSession() as session:
            await RemoteTokenizer(session, "http://127.0.0.1:9", "m").token_ids(TextPrompts(["a"]))

    with pytest.raises(TokenizerUnavailableError, match=r"127\.0\.0\.1:9/tokenize"):
        asyncio.run(main())
