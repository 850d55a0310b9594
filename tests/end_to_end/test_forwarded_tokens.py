"""Token ids that the router sends with prompts: byte for byte, and only where the worker's trial allows it."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_under_test import RouterUnderTest, router, until
from scripted_worker import Exchange, ScriptedWorker, scripted_workers

import simulator.worker
from http_api.errors import RequestError
from indexer.hashing import PackedPrompt
from router.apis.endpoints import ANTHROPIC, CHAT, RESPONSES, read_request
from router.apis.prompt_ids import with_prompt_ids
from router.apis.requests import ChatPrompt, TextPrompts
from router.routing.disaggregation.adapters import Adapter, DecodeAlone, Mooncake, Nixl, WorkerEndpoint
from router.tokens import TokenizerUnavailableError
from router.tokens.local_tokenizer import LocalTokenizer

MODEL = Path(simulator.worker.__file__).parent / "model"
AUTO: dict[str, Any] = {"proxy": {"forward_tokens": "auto"}}
USER = {"role": "user", "content": "Which worker holds it?"}
ANSWER = {"role": "assistant", "content": "The second."}
BODY: dict[str, Any] = {"model": "m", "messages": [USER]}
FUNCTION = {"name": "f", "description": "Finds it.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
HANDED_OVER = {"remote_block_ids": [1]}
CALL = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.fixture(scope="module")
def local() -> LocalTokenizer:
    return LocalTokenizer.load(str(MODEL))


@cache
def _sglang() -> LocalTokenizer:
    return LocalTokenizer.load(str(MODEL), sglang=True)


class Engine:
    """The answers of an engine: it computes the ids that it receives, else those of its own rendering.

    - `sglang`: it is an SGLang, not a vLLM; `chat_template`: the one that SGLang was started with.
    - `version`: its release.
    - `prefix`: what its chat template writes before each conversation.
    - `splits_numbers`: it has more tokens for a number of several digits.
    - `renders`: it offers to render prompts of all APIs.
    - `fails`: the number of chats to answer with 503.
    - `cuts`: it breaks off streams after their first event.
    - `miscounts`: it reports one prompt token more.
    """

    def __init__(self, local: LocalTokenizer) -> None:
        self.sglang = False
        self.chat_template: str | None = None
        self.version = "0.32.0"
        self.prefix = b""
        self.splits_numbers = False
        self.renders = False
        self.fails = 0
        self.cuts = False
        self.miscounts = False
        self.chats: list[bytes] = []
        self.worker: ScriptedWorker
        self._local = local

    async def script(self, exchange: Exchange) -> None:
        match exchange.target:
            case "/v1/models":
                await exchange.answer(json.dumps({"data": [{"id": "m", "root": str(MODEL)}]}).encode())
            case "/kv_event_sources" if not self.sglang:
                await exchange.answer()
            case "/server_info" if self.sglang:
                info = {"version": self.version, "chat_template": self.chat_template}
                await exchange.answer(json.dumps(info).encode())
            case "/version":
                await exchange.answer(json.dumps({"version": self.version}).encode())
            case "/v1/chat/completions" | "/v1/responses" | "/v1/messages":
                await self._chat(exchange)
            case target if self.renders and target.endswith("/render"):
                ids = self.ids(exchange.body, target.removesuffix("/render"))
                await exchange.answer(json.dumps({"token_ids": ids}).encode())
            case _:
                await exchange.answer(status="404 Not Found")

    async def _chat(self, exchange: Exchange) -> None:
        fields = json.loads(exchange.body)
        computed = self.ids(exchange.body, exchange.target)
        if "return_prompt_token_ids" not in fields:  # not a trial's
            self.chats.append(exchange.body)
            if self.fails:
                self.fails -= 1
                await exchange.answer(status="503 Service Unavailable")
                return
        usage = {"prompt_tokens": len(computed) + self.miscounts, "completion_tokens": 1}
        if not fields.get("stream"):
            if exchange.target != CHAT:
                usage = {"input_tokens": usage["prompt_tokens"], "output_tokens": 1}
            answer = {"prompt_token_ids": computed, "usage": usage, "kv_transfer_params": HANDED_OVER}
            await exchange.answer(json.dumps(answer).encode())
            return
        await exchange.begin_chunks()
        await exchange.chunk(b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n')
        if self.cuts:
            await exchange.hang_up()
            return
        if (fields.get("stream_options") or {}).get("include_usage"):
            await exchange.chunk(b'data: {"choices":[],"usage":%b}\n\n' % json.dumps(usage).encode())
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.chunk(b"")

    def ids(self, body: bytes, path: str = CHAT) -> list[int]:
        """Return the ids that the engine computes for a body."""
        fields = json.loads(body)
        given = fields.get("input_ids", (fields.get("kv_transfer_params") or {}).get("prompt_token_ids"))
        if given is not None:
            return list(given)
        prompt = read_request("POST", path, [], body).prompt
        assert isinstance(prompt, (ChatPrompt, TextPrompts))
        try:
            more = [1] if self.splits_numbers and re.search(rb"\d{4}", body) else []
            local = _sglang() if self.sglang else self._local
            return [*self.prefix, *local.tokenize(prompt)[0], *more]
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


async def sent(routed: RouterUnderTest, engine: Engine, body: bytes, path: str = CHAT) -> bytes:
    """Send a prompt and return its body as the engine received it."""
    assert (await routed.call(path, body)).status == 200
    return engine.chats[-1]


@pytest.fixture
def engine(local: LocalTokenizer) -> Engine:
    return Engine(local)


def with_ids(engine: Engine, body: bytes, path: str = CHAT) -> bytes:
    """Return a body with the engine's own ids of it."""
    ids = json.dumps(engine.ids(body, path)).replace(" ", "")
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


TEXT = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
USE = {"type": "tool_use", "id": "call00001", "name": "f", "input": {"a": [1, 1.5]}}
RESULT = {"type": "tool_result", "tool_use_id": "call00001", "content": "2"}
THOUGHT = {"type": "thinking", "thinking": "b", "signature": ""}
CALLED = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
FLAT = FUNCTION | {"type": "function", "strict": False}
SCHEMA = {"name": "f", "description": "Finds it.", "input_schema": FUNCTION["parameters"]}
# Requests of other APIs with ids, and without.
OTHERS: list[tuple[str, dict[str, Any], bool]] = [
    (RESPONSES, {"input": "a", "instructions": "b", "store": False, "text": {"format": {"type": "text"}}}, True),
    (RESPONSES, {"input": [USER, ANSWER, USER | {"type": "message"}], "stream": True}, True),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}], "tools": [FLAT]}, True),
    (RESPONSES, {"input": [USER, CALLED, {"type": "function_call_output", "call_id": "c", "output": "2"}]}, True),
    (RESPONSES, {"input": "a", "truncation": "auto"}, False),
    (RESPONSES, {"input": "a", "previous_response_id": "resp_1"}, False),
    (RESPONSES, {"input": "a", "conversation": "conv_1"}, False),
    (RESPONSES, {"input": "a", "reasoning": {"effort": "low"}}, False),
    (RESPONSES, {"input": "a", "tools": [{"type": "web_search"}]}, False),
    (RESPONSES, {"input": [{"role": "system", "content": "a"}]}, False),
    (RESPONSES, {"input": [USER, ANSWER | {"status": "incomplete"}]}, False),
    (RESPONSES, {"input": [{"type": "reasoning", "summary": []}, USER]}, False),
    (ANTHROPIC, {"messages": [USER], "system": "a", "thinking": {"type": "enabled", "budget_tokens": 1024}}, True),
    (ANTHROPIC, {"messages": [{"role": "user", "content": [TEXT, TEXT]}], "system": [TEXT], "stream": True}, True),
    (
        ANTHROPIC,
        {
            "messages": [
                USER,
                {"role": "assistant", "content": [THOUGHT, TEXT, USE]},
                {"role": "user", "content": [RESULT]},
            ],
            "tools": [SCHEMA],
            "tool_choice": {"type": "auto"},
        },
        True,
    ),
    (ANTHROPIC, {"messages": [USER], "thinking": {"type": "disabled"}}, False),
    (ANTHROPIC, {"messages": [USER], "output_config": {"effort": "low"}}, False),
    (ANTHROPIC, {"messages": [USER], "tools": [SCHEMA], "tool_choice": {"type": "none"}}, False),
    (ANTHROPIC, {"messages": [USER], "tools": [SCHEMA | {"defer_loading": True}]}, False),
    (ANTHROPIC, {"messages": [USER, {"role": "system", "content": "a"}, USER]}, False),
    (ANTHROPIC, {"messages": [{"role": "user", "content": [RESULT | {"is_error": True}]}]}, False),
    (ANTHROPIC, {"messages": [{"role": "user", "content": [{"type": "image", "source": {"data": ""}}]}]}, False),
    ("/v1/completions", {"prompt": "x"}, False),
    ("/v1/chat/completions/batch", BODY, False),
]


@pytest.mark.parametrize("renders", [True, False])
async def test_other_apis_receive_ids_if_engine_renders_them(engine: Engine, renders: bool) -> None:
    """Without the engine's own rendering, their conversion to chats is not proved."""
    engine.renders = renders
    async with forwarding(engine) as routed:
        for path, fields, known in OTHERS:
            body = json.dumps({"model": "m", "max_tokens": 9} | fields).encode()
            if path == RESPONSES:
                body = body.replace(b"max_tokens", b"max_output_tokens")
            await routed.call(path, body)
            received = [each.body for each in engine.worker.exchanges if each.target == path][-1]
            assert received == (with_ids(engine, body, path) if known and renders else body), fields


async def test_counts_of_other_apis_are_checked(engine: Engine) -> None:
    engine.renders = engine.miscounts = True
    async with forwarding(engine) as routed:
        await routed.call(ANTHROPIC, BODY | {"max_tokens": 9})
        assert "another number" in (await reasons(routed))[0]


async def test_nothing_is_sent_by_default(engine: Engine) -> None:
    async with scripted_workers(engine.script) as [worker]:
        worker.answers_discovery = False
        async with router(worker.url) as routed:
            body = json.dumps(BODY).encode()
            assert await sent(routed, engine, body) == body
            assert await reasons(routed) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": "0.31.2"}, "its version is 0.31.2"),
        ({"version": "x"}, "version"),
        ({"version": "9" * 5000 + ".0.0"}, "version"),
        ({"prefix": b"\1"}, "differ"),
        ({"splits_numbers": True}, "differ"),
    ],
)
async def test_workers_without_proof_receive_no_ids(engine: Engine, change: dict[str, Any], reason: str) -> None:
    for name, value in change.items():
        setattr(engine, name, value)
    async with forwarding(engine) as routed:
        assert reason in (await reasons(routed))[0]
        body = json.dumps(BODY).encode()
        assert await sent(routed, engine, body) == body


@pytest.mark.parametrize(
    ("version", "template", "reason"),
    [
        ("0.5.13", None, ""),
        ("0.6", "/templates/x.jinja", ""),
        ("0.5.12", None, "its version is 0.5.12"),
        ("0.5.20", "vicuna", "template vicuna"),
    ],
)
async def test_sglang_receives_ids_of_plain_texts(
    engine: Engine, version: str, template: str | None, reason: str
) -> None:
    engine.sglang, engine.version, engine.chat_template = True, version, template
    async with forwarding(engine) as routed:
        [found] = await reasons(routed)
        assert reason in found
        assert bool(reason) == bool(found)
        texts = [{"type": "text", "text": text} for text in "ab"]
        plain = [
            [{"role": "system", "content": "a"}, USER, ANSWER, USER],
            [{"role": "developer", "content": "a"}, {"role": "user", "content": texts}],
            [USER, ANSWER],
        ]
        for messages in plain:
            body = json.dumps(BODY | {"messages": messages}).encode()
            ids = json.dumps(engine.ids(body)).replace(" ", "").encode()
            assert await sent(routed, engine, body) == (body if reason else body[:-1] + b',"input_ids":%b}' % ids)
        for fields in (*FORWARDED[4:], {"messages": [USER | {"name": "ann"}]}):
            body = json.dumps(BODY | fields).encode()
            assert await sent(routed, engine, body) == body, fields


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


async def test_repeated_trial_finds_a_changed_template(engine: Engine) -> None:
    """The template changes behind the router's back."""
    async with forwarding(engine, constants={"check_interval": 0.2}, fleet={"probe_interval": 0.1}) as routed:
        engine.prefix = b"\1"
        await until(lambda: reasons(routed), lambda found: "differ" in found[0])
        body = json.dumps(BODY).encode()
        assert await sent(routed, engine, body) == body


async def test_restarted_worker_receives_no_ids_before_its_trial(engine: Engine) -> None:
    """The new process has another chat template."""
    async with forwarding(engine, fleet={"probe_interval": 0.1}) as routed:
        body = json.dumps(BODY).encode()
        assert await sent(routed, engine, body) == with_ids(engine, body)
        await engine.worker.stop()
        await until(lambda: routed.workers(), lambda workers: workers[0]["state"] == "down")
        engine.prefix = b"\1"
        engine.chats.clear()
        await engine.worker.start()

        async def next_reasons() -> list[str]:
            await routed.call(CHAT, body)
            return await reasons(routed)

        await until(next_reasons, lambda found: "differ" in found[0])
        await routed.call(CHAT, body)
        assert set(engine.chats) == {body}


async def test_continued_stream_has_no_ids(local: LocalTokenizer) -> None:
    """The rest of an answer has another prompt than its beginning."""
    first, second = Engine(local), Engine(local)
    async with forwarding(first, second, proxy=AUTO["proxy"] | {"stream_failovers": 1}) as routed:
        first.cuts = True
        for number in range(40):
            message = {"role": "user", "content": f"{number} sheep"}
            reply = await routed.call(CHAT, BODY | {"messages": [message], "stream": True})
            assert reply.body.count(b'"content":"a"') == 1 + bool(first.chats)
            assert b'"usage"' not in reply.body
            if first.chats:
                break
        assert json.loads(first.chats[0])["kv_transfer_params"]["prompt_token_ids"]
        rest = json.loads(second.chats[-1])
        assert rest["messages"] == [message, {"role": "assistant", "content": "a"}]
        assert "kv_transfer_params" not in rest


@pytest.mark.parametrize("too_old", [None, 0, 1])
async def test_both_workers_of_a_pair_receive_ids(local: LocalTokenizer, too_old: int | None) -> None:
    """If one of them may not receive ids, neither does."""
    pair = Engine(local), Engine(local)
    if too_old is not None:
        pair[too_old].version = "0.31.0"
    async with scripted_workers(*(engine.script for engine in pair)) as servers:
        for server in servers:
            server.answers_discovery = False
        roles = ("prefill", "decode")
        workers = [{"url": server.url, "role": role} for server, role in zip(servers, roles, strict=True)]
        async with router(
            **AUTO | {"workers": workers, "disaggregation": {"backend": "nixl", "decode_computes": False}}
        ) as routed:
            await routed.until_tokenizers_are_tried()
            await until(lambda: reasons(routed), lambda found: len(found) == 2 and not any("trial" in x for x in found))
            body = json.dumps(BODY).encode()
            assert (await routed.call(CHAT, body)).status == 200
            prefill, decode = (json.loads(engine.chats[-1])["kv_transfer_params"] for engine in pair)
            ids = {} if too_old is not None else {"prompt_token_ids": pair[0].ids(body)}
            remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
            assert prefill == {"do_remote_decode": True, "do_remote_prefill": False} | remote | ids
            assert decode == HANDED_OVER | ids
            assert await routed.metric("kvrouter_forwarded_token_requests_total", model="m") == (ids != {})


@pytest.mark.parametrize(("adapter", "fields"), [(Mooncake, {}), (Nixl, {"n": 2}), (Nixl, {})])
def test_adapters_keep_ids_beside_their_own_parameters(adapter: type[Adapter], fields: dict[str, Any]) -> None:
    """Without blocks to pull, and with several answers, the decode worker computes the prompt."""
    ends = [WorkerEndpoint("h", 1), WorkerEndpoint("h", 2)]
    body = json.dumps(BODY | fields).encode()
    plain, requests = (adapter.of(CHAT, body, ends[0], ends[1], ids) for ids in (None, PackedPrompt.of([1, 2])))
    for without, part in [(plain.decode(b"{}"), requests.decode(b"{}"))] + (
        [] if isinstance(requests, DecodeAlone) else [(plain.prefill(), requests.prefill())]
    ):
        expected, found = json.loads(without.body), json.loads(part.body)
        names = found["kv_transfer_params"].keys() - {"prompt_token_ids"}
        assert found["kv_transfer_params"]["prompt_token_ids"] == [1, 2]
        assert names == expected.pop("kv_transfer_params", {}).keys()
        assert expected == {name: value for name, value in found.items() if name != "kv_transfer_params"}


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


@settings(max_examples=40)
@given(st.dictionaries(st.text(max_size=5), values, min_size=1, max_size=4), ids, st.sampled_from([None, 1, "\t"]))
def test_inserted_ids_leave_all_other_bytes_alone(fields: dict[str, Any], ids: list[int], indent: Any) -> None:
    body = json.dumps(fields, indent=indent).encode()
    longer = with_prompt_ids(body + b" \n", PackedPrompt.of(ids))
    assert longer.startswith(body[: body.rindex(b"}")])
    assert json.loads(longer) == fields | {"kv_transfer_params": {"prompt_token_ids": ids}}
