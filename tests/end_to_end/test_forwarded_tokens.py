"""Token ids that the router sends with chats: byte for byte, and only where the worker's trial allows it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_workers

import simulator.worker
from http_api.errors import RequestError
from indexer.hashing import PackedPrompt
from router.apis.endpoints import CHAT, Call, read_call
from router.apis.prompt_ids import with_prompt_ids
from router.apis.requests import ChatPrompt
from router.tokens import TokenizerUnavailableError
from router.tokens.local_tokenizer import LocalTokenizer

MODEL = Path(simulator.worker.__file__).parent / "model"
AUTO: dict[str, Any] = {"proxy": {"forward_tokens": "auto"}}
USER = {"role": "user", "content": "Which worker holds it?"}
ANSWER = {"role": "assistant", "content": "The second."}
BODY: dict[str, Any] = {"model": "m", "messages": [USER]}
FUNCTION = {"name": "f", "description": "Finds it.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def local() -> LocalTokenizer:
    return LocalTokenizer.load(str(MODEL))


class Engine:
    """The answers of a vLLM: it computes the ids that it receives, else those of its own rendering.

    - `version`: its release.
    - `prefix`: what its chat template writes before each conversation.
    - `fails`: the number of chats to answer with 503.
    - `miscounts`: it reports one prompt token more.
    """

    def __init__(self, local: LocalTokenizer) -> None:
        self.version = "0.32.0"
        self.prefix = b""
        self.fails = 0
        self.miscounts = False
        self.chats: list[bytes] = []
        self.worker: ScriptedWorker
        self._local = local

    async def script(self, exchange: Exchange) -> None:
        match exchange.target:
            case "/v1/models":
                await exchange.answer(json.dumps({"data": [{"id": "m", "root": str(MODEL)}]}).encode())
            case "/kv_event_sources":
                await exchange.answer()
            case "/version":
                await exchange.answer(json.dumps({"version": self.version}).encode())
            case "/v1/chat/completions":
                await self._chat(exchange)
            case _:
                await exchange.answer(status="404 Not Found")

    async def _chat(self, exchange: Exchange) -> None:
        fields = json.loads(exchange.body)
        computed = self.ids(exchange.body)
        if fields.get("max_completion_tokens") != 1:  # not a trial's
            self.chats.append(exchange.body)
            if self.fails:
                self.fails -= 1
                await exchange.answer(status="503 Service Unavailable")
                return
        usage = {"prompt_tokens": len(computed) + self.miscounts, "completion_tokens": 1}
        if not fields.get("stream"):
            await exchange.answer(json.dumps({"prompt_token_ids": computed, "usage": usage}).encode())
            return
        await exchange.begin_chunks()
        await exchange.chunk(b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n')
        if (fields.get("stream_options") or {}).get("include_usage"):
            await exchange.chunk(b'data: {"choices":[],"usage":%b}\n\n' % json.dumps(usage).encode())
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.chunk(b"")

    def ids(self, body: bytes) -> list[int]:
        """Return the ids that the engine computes for a body."""
        given = (json.loads(body).get("kv_transfer_params") or {}).get("prompt_token_ids")
        if given is not None:
            return list(given)
        prompt = read_call(Call("POST", CHAT, [], body)).prompt
        assert isinstance(prompt, ChatPrompt)
        try:
            return [*self.prefix, *self._local.encode_chat(prompt)]
        except (RequestError, TokenizerUnavailableError):  # only the engine knows them
            return []


@asynccontextmanager
async def forwarding(*engines: Engine, **sections: Any) -> AsyncIterator[RouterUnderTest]:
    """Run a router that sends ids, after the trials of its workers."""
    async with scripted_workers(*(engine.script for engine in engines)) as workers:
        for engine, worker in zip(engines, workers, strict=True):
            worker.answers_discovery = False
            engine.worker = worker
        async with router(*(worker.url for worker in workers), **(AUTO | sections)) as routed:
            await until(
                lambda: reasons(routed),
                lambda found: len(found) == len(engines) and not any("trial" in reason for reason in found),
            )
            yield routed


async def reasons(routed: RouterUnderTest) -> list[str]:
    """Return for each worker why no ids are sent; "" if they are."""
    report = (await routed.call("/workers")).json()["tokenizers"].get("m", {})
    return list(report.get("ids_not_sent", {}).values())


async def sent(routed: RouterUnderTest, engine: Engine, body: bytes) -> bytes:
    """Send a chat and return its body as the engine received it."""
    assert (await routed.call(CHAT, body)).status == 200
    return engine.chats[-1]


@pytest.fixture
def engine(local: LocalTokenizer) -> Engine:
    return Engine(local)


def with_ids(engine: Engine, body: bytes) -> bytes:
    """Return a body with the engine's own ids of it."""
    ids = json.dumps(engine.ids(body)).replace(" ", "")
    return body[:-1] + b',"kv_transfer_params":{"prompt_token_ids":%b}}' % ids.encode()


FORWARDED: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "stop": ["x"], "cache_salt": "s", "response_format": {"type": "json_object"}, "n": 2},
    {"messages": [{"role": "system", "content": "Be brief."}, USER, ANSWER, USER]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"tools": TOOLS, "tool_choice": "auto"},
    {
        "tools": TOOLS,
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call00001", "content": "2"},
        ],
    },
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"messages": [USER, ANSWER], "add_generation_prompt": False, "continue_final_message": True},
    {"add_generation_prompt": False},
    {"reasoning_effort": "low", "user": "é"},
]
PLAIN: list[dict[str, Any]] = [
    {"echo": True},
    {"truncate_prompt_tokens": 3},
    {"chat_template": "{{ 1 }}"},
    {"chat_template_kwargs": {"enable_thinking": "false"}},
    {"chat_template_kwargs": {"other": True}},
    {"chat_template_kwargs": {"chat_template": None}},
    {"add_generation_prompt": "false"},
    {"add_generation_prompt": 0},
    {"continue_final_message": 1, "add_generation_prompt": False},
    {"add_special_tokens": True},
    {"documents": [{"title": "a", "text": "b"}]},
    {"reasoning_effort": "none"},
    {"tools": TOOLS, "tool_choice": "none"},
    {"tools": []},
    {"tools": [TOOLS[0] | {"strict": True}]},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
    {"mm_processor_kwargs": {}},
    {"media_io_kwargs": {}},
    {"prompt_embeds": None},
    {"vllm_xargs": {}},
    {"not_known_yet": None},
    {"messages": [USER | {"reasoning_content": "x"}]},
    {"messages": [{"role": "critic", "content": "x"}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
    {"messages": [{"role": "user", "content": ["a"]}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
    {"messages": [USER, ANSWER | {"tool_calls": [CALL | {"index": 0}]}]},
    {"messages": [USER, ANSWER | {"audio": {"id": "x"}}, USER]},
]


async def test_ids_go_only_with_shapes_that_are_known(engine: Engine) -> None:
    """Other bodies are sent as they are. The body with ids is the client's with one field at its end."""
    async with forwarding(engine) as routed:
        assert await reasons(routed) == [""]
        for fields in FORWARDED:
            body = json.dumps(BODY | fields, ensure_ascii=False).encode()
            assert await sent(routed, engine, body) == with_ids(engine, body), fields
        for fields in PLAIN:
            body = json.dumps(BODY | fields).encode()
            assert await sent(routed, engine, body) == body, fields
        assert await routed.metric("kvrouter_forwarded_token_requests_total", model="m") == len(FORWARDED)
        assert await routed.metric("kvrouter_forwarded_token_bytes_total", model="m") > 0


async def test_other_paths_receive_no_ids(engine: Engine) -> None:
    async with forwarding(engine) as routed:
        body = json.dumps(BODY | {"input": "x", "prompt": "x", "max_tokens": 1}).encode()
        for path in ("/v1/completions", "/v1/responses", "/v1/messages", "/v1/chat/completions/batch"):
            await routed.call(path, body)
            assert [each.body for each in engine.worker.exchanges if each.target == path][-1] == body, path


async def test_nothing_is_sent_by_default(engine: Engine) -> None:
    async with scripted_workers(engine.script) as [worker]:
        worker.answers_discovery = False
        async with router(worker.url) as routed:
            body = json.dumps(BODY).encode()
            assert await sent(routed, engine, body) == body
            assert await reasons(routed) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"version": "0.31.2"}, "its version is 0.31.2"), ({"version": "x"}, "version"), ({"prefix": b"\1"}, "differ")],
)
async def test_workers_without_proof_receive_no_ids(engine: Engine, change: dict[str, Any], reason: str) -> None:
    for name, value in change.items():
        setattr(engine, name, value)
    async with forwarding(engine) as routed:
        assert reason in (await reasons(routed))[0]
        body = json.dumps(BODY).encode()
        assert await sent(routed, engine, body) == body


async def test_retry_asks_the_permission_of_its_own_worker(local: LocalTokenizer) -> None:
    """The first worker fails every chat. The second is too old for ids."""
    first, second = Engine(local), Engine(local)
    second.version = "0.30.0"
    async with forwarding(first, second) as routed:
        first.fails = 1000
        for number in range(40):  # new prompts, because a known one stays with the second worker
            body = json.dumps(BODY | {"messages": [{"role": "user", "content": f"{number} sheep"}]}).encode()
            assert await sent(routed, second, body) == body
            if first.chats:
                break
        assert first.chats == [with_ids(first, body)]


async def test_another_count_ends_forwarding(engine: Engine) -> None:
    """The template changes behind the router's back; a worker that ignores ids counts its own prompt."""
    async with forwarding(engine) as routed:
        body = json.dumps(BODY).encode()
        engine.miscounts = True
        assert await sent(routed, engine, body) == with_ids(engine, body)
        assert await sent(routed, engine, body) == body
        assert "another number" in (await reasons(routed))[0]
        assert await routed.metric("kvrouter_forwarded_token_mismatches_total", model="m") == 1
        assert "ids_miscounted" in {found["finding"] for found in await routed.findings()}


async def test_sampled_requests_find_a_changed_template(engine: Engine) -> None:
    """A request without ids is counted by the engine's own rendering."""
    async with forwarding(engine) as routed:
        engine.prefix = b"\1"
        body = json.dumps(BODY).encode()
        received = [await sent(routed, engine, body) for _ in range(70)]
        assert received.index(body) == 63
        assert set(received[63:]) == {body}


@pytest.mark.parametrize("options", [None, {"include_usage": True}])
async def test_streams_are_counted_and_usage_is_hidden_if_not_asked_for(
    engine: Engine, options: dict[str, Any] | None
) -> None:
    async with forwarding(engine) as routed:
        engine.miscounts = True
        fields = BODY | {"stream": True} | ({"stream_options": options} if options else {})
        reply = await routed.call(CHAT, fields)
        assert (b'"usage"' in reply.body) == bool(options)
        assert reply.body.endswith(b"data: [DONE]\n\n")
        assert "another number" in (await reasons(routed))[0]


ids = st.lists(st.integers(0, 2**32 - 1), max_size=50)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), values, min_size=1, max_size=4), ids, st.sampled_from([None, 1, "\t"]))
def test_inserted_ids_leave_all_other_bytes_alone(fields: dict[str, Any], ids: list[int], indent: Any) -> None:
    body = json.dumps(fields, indent=indent).encode()
    longer = with_prompt_ids(body + b" \n", PackedPrompt.of(ids))
    assert longer.startswith(body[: body.rindex(b"}")])
    assert json.loads(longer) == fields | {"kv_transfer_params": {"prompt_token_ids": ids}}
