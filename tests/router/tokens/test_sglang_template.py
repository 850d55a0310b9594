"""Chats as SGLang renders them, held against prompts that SGLang 0.5.23 computed."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_engine import MODEL

from http_api.errors import RequestError
from router.apis.endpoints import ANTHROPIC, CHAT, RESPONSES, read_request
from router.apis.messages import BILLING_HEADER
from router.apis.requests import ChatPrompt, TextPrompts, Truncation
from router.tokens.local_tokenizer import LocalTokenizer
from router.tokens.model_files import ModelFiles
from router.tokens.sglang_template import SglangTemplate

RECORDED = json.loads((Path(__file__).parents[2] / "data/engine_answers/sglang-0.5.23.chats.json").read_text())
TEMPLATES: dict[str, str] = RECORDED["templates"]
FILES = ModelFiles.read(MODEL)
USER = {"role": "user", "content": "Who?"}
ANSWER = {"role": "assistant", "content": "The second."}


def chat_of(body: dict[str, Any], path: str = CHAT) -> ChatPrompt:
    prompt = read_request("POST", path, [], msgspec.json.encode({"model": "m"} | body)).prompt
    assert isinstance(prompt, ChatPrompt)
    return prompt


@pytest.mark.parametrize(
    "recorded", RECORDED["chats"], ids=lambda chat: f"{chat['template']}-{str(chat['body'])[13:60]}"
)
def test_chat_is_rendered_as_the_engine_does(recorded: dict[str, Any]) -> None:
    template, chat = SglangTemplate(TEMPLATES[recorded["template"]]), chat_of(recorded["body"])
    assert template.render(chat) + template.answer_to_continue(chat) == recorded["prompt"]


def test_chosen_tool_is_the_only_one() -> None:
    """Without grammars, the recorded engine refuses a chosen tool."""
    tools = [{"type": "function", "function": {"name": name}} for name in "ab"]
    choice = {"type": "function", "function": {"name": "b"}}
    template = SglangTemplate("{% for tool in tools %}{{ tool.function.name }}{% endfor %}")
    assert template.render(chat_of({"messages": [USER], "tools": tools, "tool_choice": choice})) == "b"
    assert template.render(chat_of({"messages": [USER], "tools": tools, "tool_choice": "required"})) == "ab"


def test_template_that_refuses_typed_tools_receives_functions() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    template = SglangTemplate("{% for t in tools %}{{ raise_exception('x') if t.type else t.name }}{% endfor %}")
    assert template.render(chat_of({"messages": [USER], "tools": tools})) == "f"


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (
            RESPONSES,
            {"input": [{"role": "developer", "content": "Be brief."}, USER]},
            "Developer instructions:\nBe brief.",
        ),
        (
            RESPONSES,
            {"instructions": "One.", "input": [USER, {"role": "developer", "content": "Two."}, USER]},
            "One.\n\nDeveloper instructions:\nTwo.",
        ),
        (
            ANTHROPIC,
            {"system": [{"type": "text", "text": f"{BILLING_HEADER}: x"}, {"type": "text", "text": "One."}]},
            f"{BILLING_HEADER}: x\nOne.",
        ),
        (ANTHROPIC, {"system": "One.", "messages": [USER, {"role": "system", "content": "Two."}, USER]}, "One.\nTwo."),
    ],
)
def test_systems_of_other_apis_are_one_if_the_template_shows_only_the_first(
    path: str, body: dict[str, Any], text: str
) -> None:
    source = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    assert SglangTemplate(source).render(chat_of({"messages": [USER]} | body, path)) == text


def test_continued_answer_is_tokenized_by_itself_without_the_first_token_of_texts() -> None:
    local = LocalTokenizer(FILES, sglang=True)
    with_answer = local.encode_chat(chat_of({"messages": [USER, ANSWER], "continue_final_message": True}))
    (answer,) = local.encode(["The second."], add_special_tokens=False)
    assert list(with_answer) == [*local.encode_chat(chat_of({"messages": [USER]})), *answer]


def test_fields_that_only_vllm_reads_change_no_tokens() -> None:
    local = LocalTokenizer(FILES, sglang=True)
    prompt = local.encode_chat(chat_of({"messages": [USER]}))
    for fields in ({"truncate_prompt_tokens": 3}, {"add_special_tokens": True}, {"add_generation_prompt": False}):
        assert local.encode_chat(chat_of({"messages": [USER]} | fields)) == prompt
    assert local.tokenize(TextPrompts(["a b c d"], False, Truncation(1))) == local.tokenize(TextPrompts(["a b c d"]))


def test_media_are_parts_of_templates_that_name_them() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,red"}}
    chat = chat_of({"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, image]}]})
    source = "{% for p in messages[0].content %}{{ p.text or '<image>' }}{% endfor %}"
    assert SglangTemplate(source).render(chat) == "What?<image>"
    local = LocalTokenizer(replace(FILES, templates={"default": source}), sglang=True)
    before, whole = local.encode_around_media(chat)
    assert 0 < len(before) < len(whole)


NAMES = ["type", "text", "function", "name", "arguments", "effort", "enabled", "role", "image_url"]
FIELDS = ["tools", "tool_choice", "reasoning", "reasoning_effort", "chat_template_kwargs", "documents"]
OF_MESSAGES = ["tool_calls", "tools", "name", "reasoning", "reasoning_content", "prefix"]
values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["a", "text", "function", "user", "none", "0.5"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)
parts = st.text(max_size=2) | st.dictionaries(st.sampled_from(["type", "text"]), values)
contents = st.none() | st.text(max_size=3) | st.lists(parts)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "User", "user", "assistant", "tool"])},
    optional={"content": contents, **dict.fromkeys(OF_MESSAGES, values)},
)


@given(
    st.fixed_dictionaries(
        {"messages": st.lists(messages, min_size=1, max_size=3)}, optional=dict.fromkeys(FIELDS, values)
    ),
    st.sampled_from(sorted(TEMPLATES)),
)
def test_invalid_chats_are_refused_and_raise_nothing_else(body: dict[str, Any], template: str) -> None:
    compiled = SglangTemplate(TEMPLATES[template])
    chat = chat_of(body)
    with suppress(RequestError):
        compiled.render(chat)
        compiled.answer_to_continue(chat)
