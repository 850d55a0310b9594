"""Prompts by their text: two turns of a conversation begin alike, others do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.apis.openai_requests import decode_chat
from router.apis.requests import ChatPrompt, TextPrompts, TokenPrompts, Truncation
from router.tokens import TokenizerUnavailableError
from router.tokens.text_prefixes import text_prefixes

SYSTEM = {"role": "system", "content": "Be brief. " * 30}


def text(*messages: dict[str, Any], **more: Any) -> bytes:
    (packed,) = text_prefixes(ChatPrompt(list(messages), **more))
    return packed.tokens


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_texts_are_unchanged_whole_or_in_parts() -> None:
    assert text(user([{"type": "text", "text": "What is it?"}])) == text(user("What is it?"))
    assert [each.tokens for each in text_prefixes(TextPrompts(["abcdefgh", "é" * 4]))] == [b"abcdefgh", b"\xc3\xa9" * 4]


@pytest.mark.parametrize(
    "other", [[{"role": "user", "content": SYSTEM["content"]}], [SYSTEM | {"content": "be brief. " * 30}]]
)
def test_roles_and_words_distinguish_prompts(other: list[dict[str, Any]]) -> None:
    assert text(*other)[:8] != text(SYSTEM)[:8] or text(*other)[:20] != text(SYSTEM)[:20]


@pytest.mark.parametrize(
    "more",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template": "{{ messages }}"},
        {"reasoning_effort": "low"},
    ],
)
def test_tools_and_options_are_first_like_in_templates(more: dict[str, Any]) -> None:
    assert text(SYSTEM, **more)[:64] != text(SYSTEM)[:64]


def test_images_are_distinguished_with_few_characters() -> None:
    def image(data: str) -> dict[str, Any]:
        url = f"data:image/png;base64,{data * 50_000}"
        return user([{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is it?"}])

    assert text(image("A")) != text(image("B"))
    assert len(text(image("A"))) < 100


def test_calls_and_reasoning_are_part_of_the_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    plain = {"role": "assistant", "content": None}
    assert text(user("x"), plain | {"tool_calls": [call]}) != text(user("x"), plain)
    assert text(user("x"), plain | {"reasoning": "hm"}) != text(user("x"), plain)


@pytest.mark.parametrize(
    "prompt",
    [
        TokenPrompts([[1, 2]]),
        TextPrompts(["What holds the cache?"], truncation=Truncation(3, "left")),
        ChatPrompt([user("x")], truncation=Truncation(3, "left")),
    ],
)
def test_prompt_without_text_or_with_an_unknown_start_is_refused(prompt: Any) -> None:
    with pytest.raises(TokenizerUnavailableError):
        text_prefixes(prompt)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CONTENTS = st.none() | st.text() | st.lists(st.text() | st.dictionaries(st.text(), JSON))
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.text(min_size=1), "content": CONTENTS}, optional={"name": JSON, "tool_calls": JSON}
    ),
    min_size=1,
    max_size=4,
)


@given(MESSAGES, MESSAGES)
def test_prefix_of_a_turn_begins_with_the_previous_turn(first: list[Any], more: list[Any]) -> None:
    body = {"model": "m", "messages": first}
    try:
        (before,) = text_prefixes(decode_chat(json.dumps(body).encode()).prompt)  # type: ignore[arg-type]
        (after,) = text_prefixes(decode_chat(json.dumps(body | {"messages": first + more}).encode()).prompt)  # type: ignore[arg-type]
    except TokenizerUnavailableError:
        return
    assert after.tokens.startswith(before.tokens)
    assert len(before.tokens) % 4 == 0
