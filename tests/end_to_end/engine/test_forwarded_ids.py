"""Chats whose token ids the router sends, compared with the answers of the engine that tokenizes them itself.

Each request is sent to the engine directly and through a router that sends ids, at temperature 0 and with log
probabilities. FAMILIES names the families to try, with commas; all by default.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine.compared_answers import ComparedAnswers, without_usage
from engine.installation import Installation
from engine.servers import MODEL, RouterProcess, VllmWorker
from engine.test_families import FLAGS
from engine.web import post_json
from indexer.hashing import PackedPrompt
from router.apis.endpoints import ANTHROPIC, CHAT, RESPONSES
from router.apis.prompt_ids import with_prompt_ids
from router.tokens.probes import PROBES

pytestmark = pytest.mark.engine

# Families whose prompts depend on more than the request, whose engine has an encoder of its own, or reads other tokens.
NEVER = {"gpt_oss", "deepseek_v31", "deepseek_v32", "mistral"}
MORE_FLAGS = {"qwen3": ("--reasoning-parser", "qwen3")}
# The engine renders what it is asked to: so nothing but the router prevents a wrong prompt.
TRUSTING = ("--enable-scale-out", "--trust-request-chat-template", "--max-logprobs", "20")

USER = {"role": "user", "content": "Which worker holds the prefix of this prompt, and why does it hold it?"}
SYSTEM = {"role": "system", "content": "Be brief."}
ANSWER = {"role": "assistant", "content": "The second one."}
FUNCTION = {"name": "find", "description": "Finds it.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
SCHEMA = {"type": "object", "properties": {"worker": {"type": "integer"}}, "required": ["worker"]}
LONG = "The worker that holds the longest prefix of a prompt answers it soonest. " * 40

# Fields of chats that are sent with ids, by name of the request.
KNOWN: dict[str, dict[str, Any]] = {
    "plain": {},
    "long": {"messages": [USER | {"content": LONG}]},
    "too long": {"messages": [USER | {"content": LONG * 20}]},
    "too many tokens": {"max_tokens": 5000},
    "several messages": {"messages": [SYSTEM, USER, ANSWER, USER | {"name": "ann"}]},
    "developer and tools": {"messages": [{"role": "developer", "content": "Be brief."}, USER], "tools": TOOLS},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": each} for each in ("Who?", "Why?")]}]},
    "unicode": {"messages": [USER | {"content": "naïve 漢字 🙂 \u200b\ufeff \n\t <|im_end|> </s> <think>"}]},
    "several answers": {"n": 2, "temperature": 0.9, "seed": 7},
    "stop": {"stop": ["e"], "include_stop_str_in_output": True},
    "limits": {"min_tokens": 4, "max_completion_tokens": 6, "ignore_eos": True},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "prompt log probabilities": {"prompt_logprobs": 1},
    "ids": {"return_token_ids": True},
    "salt": {"cache_salt": "s"},
    "allowed ids": {"allowed_token_ids": [100, 101, 102], "logit_bias": {"101": 5}},
    "json object": {"response_format": {"type": "json_object"}},
    "json schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": SCHEMA}}},
    "tools": {"tools": TOOLS, "tool_choice": "auto", "parallel_tool_calls": False},
    "required tool": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 40},
    "no thinking": {"chat_template_kwargs": {"enable_thinking": False}},
    "thinking": {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}},
    "no thinking and tools": {"chat_template_kwargs": {"enable_thinking": False}, "tools": TOOLS},
    "effort": {"reasoning_effort": "high", "include_reasoning": False},
    "continued": {"messages": [USER, ANSWER], "add_generation_prompt": False, "continue_final_message": True},
    "no generation prompt": {"add_generation_prompt": False},
    "stream": {"stream": True, "stream_options": {"include_usage": True}},
    "stream with tools": {"stream": True, "tools": TOOLS, "tool_choice": "required", "max_tokens": 40},
    "stream with ids": {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}},
}
# Fields by which clients could make the engine's prompt another than the router's, each as bytes in a body.
HOSTILE = (
    *('"truncate_prompt_tokens":4', '"truncate_prompt_tokens":"4"', '"truncate_prompt_tokens":4.0'),
    *('"trunc\\u0061te_prompt_tokens":4', '"truncate_prompt_tokens":null,"truncate_prompt_tokens":4'),
    '"truncate_prompt_tokens":4,"truncation_side":"right"',
    *('"chat_template_kwargs":{"enable_thinking":"no"}', '"chat_template_kwargs":{"enable_thinking":0}'),
    '"chat_template_kwargs":{"enable_thinking":true,"enable_thinking":false}',
    '"chat_template_kwargs":{"enable_thinking":null}',
    *('"chat_template_kwargs":{"add_generation_prompt":false}', '"chat_template_kwargs":{"tools":[{"a":1}]}'),
    *('"chat_template_kwargs":{"messages":[]}', '"chat_template_kwargs":{"chat_template":"{{ 1 }}"}'),
    *('"chat_template_kwargs":{"thinking":true,"x":1}', '"chat_template_kwargs":[]', '"chat_template_kwargs":{}'),
    *('"tools":[]', '"tools":null', '"tools":[{"type":"function","function":{"name":"f"}}]'),
    '"tools":[{"type":"function","function":{"name":"f","description":"","parameters":{"b":1,"a":1.0}}}]',
    '"tools":[{"type":"function","function":{"name":"f","description":"é \\ud83d\\ude42 <","parameters":{}}}]',
    '"tools":[{"type":"function","function":{"name":"f","parameters":{},"description":"d","strict":true}}]',
    '"tools":[{"function":{"parameters":{},"description":"d","name":"f"},"type":"function"}]',
    '"tools":[{"type":"function","function":{"name":"f","description":null,"parameters":{}}}]',
    '"tools":null,"t\\u006fols":[{"type":"function","function":{"name":"f","description":"","parameters":{}}}]',
    '"tools":[{"type":"function","function":{"name":"f","description":"","parameters":{}}}],"tools":null',
    *('"tool_choice":"none"', '"tool_choice":null', '"functions":[{"name":"f"}]'),
    '"tools":[{"type":"function","function":{"name":"f","description":"","parameters":{}}}],"tool_choice":"none"',
    *('"continue_final_message":1', '"continue_final_message":"true"', '"continue_final_message":true'),
    '"continue_final_message":true,"add_generation_prompt":false',
    *(
        f'"messages":[{{"role":"user","content":"a"}},{{"role":"assistant","content":"b"}}],{fields}'
        for fields in (
            '"continue_final_message":1,"add_generation_prompt":false',
            '"continue_final_message":"yes","add_generation_prompt":"no"',
            '"continue_final_mess\\u0061ge":true,"add_generation_prompt":false',
            '"continue_final_message":false,"continue_final_message":true,"add_generation_prompt":false',
            '"chat_template_kwargs":{"continue_final_message":true,"add_generation_prompt":false}',
            '"continue_final_message":true,"add_generation_prompt":true',
        )
    ),
    *('"add_generation_prompt":0', '"add_generation_prompt":"off"', '"add_generation_prompt":null'),
    *('"add_generation_prompt":false,"add_generation_prompt":true', '"add_gener\\u0061tion_prompt":false'),
    *('"chat_template":"{{ messages[0].content }}"', '"chat_template":""', '"chat_template":null'),
    *('"chat_template":null,"chat_template":"{{ 1 }}"', '"chat_template":"{{ 1 }}","chat_template":null'),
    *('"\\u0063hat_template":"{{ 1 }}"', '"documents":[{"title":"a","text":"b"}]', '"echo":true'),
    *('"add_special_tokens":true', '"add_special_tokens":"1"', '"reasoning_effort":"none"', '"reasoning_effort":null'),
    *('"messages":[{"role":"user","content":"Another."}]', '"messages":[{"role":"user","content":null}]'),
    *('"messages":[{"role":"user","content":""}]', '"messages":[{"role":"user","content":[]}]', '"messages":[]'),
    '"messages":[{"role":"user","content":[{"type":"text","text":"a"},{"text":"b"}]}]',
    '"messages":[{"role":"user","content":[{"type":"input_text","text":"a"}]}]',
    '"messages":[{"role":"User","content":"a"}]',
    '"messages":[{"role":"user","content":"a","content":"b"}]',
    '"messages":[{"role":"user","content":"a","thoughts":"b"}]',
    '"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning_content":"c"}]',
    '"messages":[{"role":"user","content":"a"},{"role":"assistant","tool_calls":[]}]',
    '"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b","reasoning":""}]',
    '"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b","tool_calls":'
    '[{"id":"call00001","type":"function","function":{"name":"f","arguments":"{\\"b\\":1, \\"a\\": 1.50}"}}]},'
    '{"role":"tool","tool_call_id":"call00001","content":"é"}]',
    '"messages":[{"role":"user","content":"a"},{"role":"assistant","content":"b","tool_calls":'
    '[{"id":"call00001","type":"function","function":{"name":"f","arguments":"no object"}}]}]',
    '"messages":[{"role":"assistant","content":"a"},{"role":"user","content":" b \\n"}]',
    '"messages":[{"role":"user","content":"a"},{"role":"user","content":"b"},{"role":"system","content":"c"}]',
    *('"mm_processor_kwargs":{}', '"media_io_kwargs":{}', '"priority":0', '"n":1', '"logprobs":null'),
    *('"kv_transfer_params":null', '"prompt_token_ids":[5]'),
)
# Requests of other APIs.
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "messages": (ANTHROPIC, {"messages": [USER], "system": "Be brief."}),
    "messages in a stream": (ANTHROPIC, {"messages": [USER, ANSWER, USER], "stream": True}),
    "responses": (RESPONSES, {"input": [USER], "instructions": "Be brief."}),
    "responses in a stream": (RESPONSES, {"input": "Which worker?", "stream": True}),
}
# Bodies of which the same ids are made if one field is overlooked.
OVERLOOKED: dict[str, dict[str, Any]] = {
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 8},
    "chat_template_kwargs": {"chat_template_kwargs": {"enable_thinking": False}},
    "tools": {"tools": TOOLS},
    "add_generation_prompt": {"add_generation_prompt": False},
    "chat_template": {"chat_template": "{{ messages[0].content }}"},
    "continue_final_message": {"add_generation_prompt": False, "continue_final_message": True},
}
# Those that a family's template does not read, or its engine refuses.
UNUSED = {
    "llama3": {"chat_template_kwargs"},
    "gemma3": {"chat_template_kwargs", "tools"},
    "idefics3": {"chat_template_kwargs", "tools"},
}


@contextmanager
def family_worker(installation: Installation, logs: Path, family: str, *flags: str) -> Iterator[VllmWorker]:
    flags = (*FLAGS[family], *MORE_FLAGS.get(family, ()), *flags)
    worker = VllmWorker(f"ids-{family}", installation, logs, installation.family(family), flags)
    worker.start()
    try:
        worker.wait_until_ready()
        yield worker
    finally:
        worker.stop()


@pytest.mark.parametrize("family", os.environ.get("FAMILIES", ",".join(FLAGS)).split(","))
def test_answers_with_ids_equal_answers_without(installation: Installation, logs: Path, family: str) -> None:
    with (
        family_worker(installation, logs, family, *TRUSTING) as worker,
        RouterProcess([worker], logs, patience=30.0, forward_tokens=True) as router,
    ):
        compared = ComparedAnswers(worker, router)
        if family in NEVER:
            assert compared.reason
        else:
            assert not compared.reason, compared.reason
            _check_control(compared, worker)
            assert _seen_if_overlooked(compared, worker) == OVERLOOKED.keys() - UNUSED.get(family, set())
        for name, fields in KNOWN.items():
            compared.compare(name, CHAT, _body(fields))
        for probe in PROBES:
            if "messages" in probe.body or "input" in probe.body:
                compared.compare(probe.kind, probe.path, _body(probe.body, probe.path))
        for name, (path, fields) in OTHERS.items():
            compared.compare(name, path, _body(fields, path))
        for field in HOSTILE:
            body = _body({}, messages=not field.startswith('"messages"'))
            compared.compare(field, CHAT, body[:-1] + b"," + field.encode() + b"}", hostile=True)
        print(f"\n{family}: {compared.sent} of {compared.asked} with ids {compared.reason}")
        print(f"not with ids: {', '.join(compared.plain)}")
        print(f"refused by the engine: {', '.join(compared.refused)}")
        assert not compared.differences, "\n".join(compared.differences)
        assert not compared.sent if family in NEVER else compared.sent > 30


def test_answers_are_equal_where_engine_renders_nothing(installation: Installation, logs: Path) -> None:
    """The engine is started as usual, so its ids are those of computed probes."""
    with (
        family_worker(installation, logs, "qwen3") as worker,
        RouterProcess([worker], logs, patience=30.0, forward_tokens=True) as router,
    ):
        compared = ComparedAnswers(worker, router)
        assert not compared.reason, compared.reason
        for name, fields in KNOWN.items():
            compared.compare(name, CHAT, _body(fields))
        for name, (path, fields) in OTHERS.items():
            compared.compare(name, path, _body(fields, path))
        assert compared.differences == []
        assert set(compared.plain) >= set(OTHERS)
        assert compared.sent > 20


def _check_control(compared: ComparedAnswers, worker: VllmWorker) -> None:
    """The engine answers the ids of another prompt like that prompt."""
    other = _body({"messages": [USER | {"content": "Name a worker."}]})
    expected, plain = (compared.direct(CHAT, body) for body in (other, _body({})))
    found = compared.direct(CHAT, with_prompt_ids(_body({}), _ids(worker, other)))
    assert found == expected
    assert without_usage(found) != without_usage(plain)


def _seen_if_overlooked(compared: ComparedAnswers, worker: VllmWorker) -> set[str]:
    """Return the fields without which the ids are those of another prompt, by the engine's answers."""
    messages = {"messages": [USER, ANSWER]}
    ids = _ids(worker, _body(messages))
    seen = set()
    for name, fields in OVERLOOKED.items():
        body = _body(messages | fields)
        expected = compared.direct(CHAT, body)
        found = compared.direct(CHAT, with_prompt_ids(body, ids))
        if expected[0] == found[0] == 200 and without_usage(found) != without_usage(expected):
            seen.add(name)
    return seen


def _ids(worker: VllmWorker, body: bytes) -> PackedPrompt:
    return PackedPrompt.of(post_json(f"{worker.url}{CHAT}/render", json.loads(body))["token_ids"])


def _body(fields: dict[str, Any], path: str = CHAT, messages: bool = True) -> bytes:
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    common = {"model": MODEL, "temperature": 0, limit: 8}
    if path == CHAT:
        common |= {"logprobs": True, "top_logprobs": 3} | ({"messages": [USER]} if messages else {})
    return json.dumps(common | fields, ensure_ascii=False).encode()
