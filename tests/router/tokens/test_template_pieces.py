"""Chat templates as pieces: always the text that Jinja renders, and for plain conversations without Jinja."""

from __future__ import annotations

import json
from datetime import datetime
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_engine import MODEL

from http_api.errors import RequestError
from router.apis.requests import ChatPrompt
from router.tokens import template_pieces
from router.tokens.chat_template import ChatTemplate
from router.tokens.sglang_template import SglangTemplate
from router.tokens.template_pieces import TemplatePieces
from router.tokens.text_encoder import AWKWARD

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LOOP = "{% for m in messages %}"
# Ways in which templates of models write contents. Each is written without Jinja for ordinary words.
TEMPLATES = {
    "bundled": json.loads((MODEL / "tokenizer_config.json").read_text())["chat_template"],
    "default system": "{% if messages[0].role != 'system' %}<sys>Be kind.</sys>{% endif %}"
    + LOOP
    + "<{{ m.role }}>{{ m['content'] }}{% if not loop.last %}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}",
    "stripped": LOOP + "{% set text = '<' + m.role + '>\n' + m['content'] | trim + '<eot>' %}"
    "{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}",
    "alternating": "{% if messages[0].role == 'system' %}{% set start = messages[0].content + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set start, turns = '', messages %}{% endif %}"
    "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 is even) %}{{ raise_exception('alternate') }}"
    "{% endif %}{{ '<' ~ m.role ~ '>' ~ (start if loop.first else '') }}"
    "{% if m.content is string %}{{ m.content | trim }}{% endif %}{% endfor %}",
    "stripped together": "{% set ns = namespace(start='') %}"
    + LOOP
    + "{% if m.role == 'system' %}{% set ns.start = m.content + '\n\n' %}{% else %}"
    "{{ '[' + (ns.start + m.content) | trim + ']' }}{% set ns.start = '' %}{% endif %}{% endfor %}",
    "thinking": "{% set ns = namespace(last=messages | length - 1) %}{% for m in messages[::-1] %}"
    "{% if m.role == 'user' and not (m.content.startswith('<tool>') and m.content.endswith('</tool>')) %}"
    "{% set ns.last = messages | length - 1 - loop.index0 %}{% break %}{% endif %}{% endfor %}"
    + LOOP
    + "{% set text, thought = m.content, '' %}{% if '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set text = m.content.split('</think>')[-1].lstrip() %}{% endif %}"
    "<{{ m.role }}>{% if loop.index0 > ns.last and thought %}<think>{{ thought }}</think>{% endif %}{{ text }}"
    "{% endfor %}{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}",
    "parts": "{% macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro %}"
    + LOOP
    + "{% set text = show(m.content) | trim %}<{{ m.role }}>{{ text }}{% endfor %}"
    "{% for m in messages %}{% for part in m.content %}{% endfor %}{% break %}{% endfor %}",
    "blocks": LOOP
    + "{% set text %}  {{ m.content }}!{% endset %}{% filter trim %} {{ m.role }}: {{ text }}{% endfilter %}"
    "{% if m.content %};{% endif %}{% if m.content == 'stop' %}{% break %}{% endif %}{% endfor %}",
    "sums": "{{ messages | map(attribute='role') | join(',') }}{{ messages[-1].content.rstrip() }}"
    + LOOP
    + "{% endfor %}",
    "dated": "{{ strftime_now('%Y-%m-%d') }}" + LOOP + "{{ m.role }}{{ m.content }}{% endfor %}",
}
# Templates whose text depends on contents in other ways, or which refuse.
OTHERS = {
    "printed": "{{ messages | tojson }}",
    "in a list": LOOP + "{{ [m.content] }}{% endfor %}",
    "length": LOOP + "{{ m.content | length }}{% endfor %}",
    "number": LOOP + "{{ m.content | int }}{% endfor %}",
    "characters": LOOP + "{{ m.content[0] }}{% for c in m.content %}.{% endfor %}{% endfor %}",
    "method": LOOP + "{{ m.content.upper() }}{{ m.content | replace('a', 'b') }}{% endfor %}",
    "format": LOOP + "{{ '%s' % m.content }}{{ '{}'.format(m.content) }}{% endfor %}",
    "join": "{{ messages | map(attribute='content') | join }}",
    "compared": LOOP + "{% if m.content < 'b' %}a{% endif %}{{ m.content in ['hello', 'x'] }}{% endfor %}",
    "looked up": LOOP + "{{ {'hello': 1}[m.content] }}{% endfor %}",
    "equal to another": "{{ messages[0].content == messages[-1].content }}",
    "escaped": LOOP + "{{ m.content | e }}{% endfor %}",
    "captured": LOOP + "{% set text %}{{ m.content }}{% endset %}{{ text | upper }}{% endfor %}",
    "strip of characters": LOOP + "{{ m.content.strip('x') }}{% endfor %}",
    "refusing": "{{ raise_exception('no') }}",
}
WORDS = ("hello", "How are you?", "漢字 and more\nlines", "one two")
CONTENTS = st.one_of(
    st.sampled_from(WORDS),
    st.sampled_from(
        (
            *AWKWARD,
            "<think>\nso\n</think>\n\nyes",
            "</think>",
            "<tool>\n1\n</tool>",
            "<tool>",
            "{{ messages }}",
            "{% for %}",
            "stop",
            "5",
            "<s></s><eot>",
            "x-anthropic-billing-header: 1\nrest",
        )
    ),
    st.text(max_size=8),
)
ROLES = st.one_of(
    st.integers(0, 5).map(lambda turns: ["user", "assistant"] * turns + ["user"]),
    st.integers(0, 5).map(lambda turns: ["system"] + ["user", "assistant"] * turns + ["user"]),
    st.lists(st.sampled_from(["system", "user", "assistant", "tool", "developer"]), min_size=1, max_size=6),
)


@st.composite
def chats(draw: st.DrawFn) -> ChatPrompt:
    messages: list[dict[str, Any]] = [{"role": role, "content": draw(CONTENTS)} for role in draw(ROLES)]
    odd = draw(st.integers(0, 9))
    if odd == 0:
        messages[-1]["content"] = draw(
            st.none() | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": CONTENTS}), max_size=2)
        )
    elif odd == 1:
        messages[0]["name"] = "ann"
    elif odd == 2:
        messages[-1]["tool_calls"] = [{"function": {"name": "f", "arguments": "{}"}}]
    return ChatPrompt(
        messages,
        tools=[{"type": "function", "function": {"name": "f"}}] if odd == 3 else None,
        chat_template_kwargs=draw(
            st.none() | st.fixed_dictionaries({"enable_thinking": st.sampled_from([True, False, 1, 0, "no", None])})
        ),
        add_generation_prompt=odd != 4,
        continue_final_message=odd == 4 and draw(st.booleans()),
    )


def text_of(template: ChatTemplate, chat: ChatPrompt) -> str:
    try:
        return template.render(chat)
    except RequestError as error:
        return f"refused: {error.message}"


def by_jinja(template: ChatTemplate) -> ChatTemplate:
    template._pieces = None
    return template


@cache
def both(kind: type[ChatTemplate], name: str) -> tuple[ChatTemplate, ChatTemplate]:
    """Return a template that is rendered in pieces, and one that Jinja renders."""
    source = (TEMPLATES | OTHERS)[name]
    return kind(source, SPECIAL), by_jinja(kind(source, SPECIAL))


@settings(max_examples=500)
@given(st.sampled_from([ChatTemplate, SglangTemplate]), st.sampled_from(sorted(TEMPLATES | OTHERS)), chats())
def test_text_is_that_of_jinja(kind: type[ChatTemplate], name: str, chat: ChatPrompt) -> None:
    ours, jinja = both(kind, name)
    assert text_of(ours, chat) == text_of(jinja, chat)


VARIABLES = {"tools": None, "documents": None, "add_generation_prompt": True, "continue_final_message": False}


def pieces_of(source: str, *names: str) -> TemplatePieces:
    return TemplatePieces(source, SPECIAL, names)


def conversation(*contents: str, start: str = "user") -> list[dict[str, Any]]:
    roles = [start, *("assistant" if number % 2 == (start == "user") else "user" for number in range(1, len(contents)))]
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_ordinary_words_are_rendered_without_jinja(name: str) -> None:
    pieces = pieces_of(TEMPLATES[name])
    for start, size in (("user", 1), ("user", 2), ("user", 5), ("system", 2), ("system", 4)):
        contents = (WORDS * 2)[:size]
        messages = conversation(*contents, start=start)
        if name == "parts":
            messages = [m | {"content": [{"type": "text", "text": m["content"]}]} for m in messages]
        assert pieces.text(messages, VARIABLES) is not None, (start, size)


@pytest.mark.parametrize("name", OTHERS)
def test_jinja_renders_what_depends_on_contents(name: str) -> None:
    assert pieces_of(OTHERS[name]).text(conversation("hello", "x", "y"), VARIABLES) is None


@pytest.mark.parametrize(
    ("name", "start", "contents"),
    [
        ("thinking", "user", ("hi", "<think>x</think>y", "so")),
        ("thinking", "user", ("hi", "ok", "<tool>1</tool>")),
        ("stripped together", "system", (" ", "hi")),
        ("stripped together", "system", ("be kind", " ")),
        ("blocks", "user", ("",)),
        ("blocks", "user", ("stop",)),
    ],
)
def test_jinja_renders_contents_that_the_template_treats_differently(
    name: str, start: str, contents: tuple[str, ...]
) -> None:
    pieces = pieces_of(TEMPLATES[name])
    assert pieces.text(conversation(*contents, start=start), VARIABLES) is None
    assert pieces.text(conversation(*WORDS[: len(contents)], start=start), VARIABLES) is not None


@pytest.mark.parametrize(
    "others", [{"tools": [{}]}, {"documents": [{}]}, {"continue_final_message": True}, {"color": 1}, {"color": ["red"]}]
)
def test_jinja_renders_other_variables(others: dict[str, Any]) -> None:
    assert (
        pieces_of("{{ color }}{{ messages[0].content }}", "color").text(conversation("hi"), VARIABLES | others) is None
    )


def test_variables_have_pieces_of_their_own() -> None:
    pieces = pieces_of("{{ color }}{{ messages[0].content }}", "color")
    found = [
        pieces.text(conversation("hi"), VARIABLES | more)
        for more in ({}, {"color": "red"}, {"color": True}, {"color": "blue"}, {"unread": [1]}, {"color": "red"})
    ]
    assert found == ["hi", "redhi", "Truehi", "bluehi", "hi", "redhi"]


def test_times_are_those_of_the_request() -> None:
    """The clock has microseconds, so no two texts are equal."""
    pieces = pieces_of("{{ strftime_now('%Y %f') }} {{ messages[0].content }}")
    found = [pieces.text(conversation("hi"), VARIABLES) or "" for _ in range(20)]
    assert all(text.startswith(f"{datetime.now().year} ") and text.endswith(" hi") for text in found)
    assert any(before < after for before, after in pairwise(found))


def test_pieces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_pieces, "_MOST_BYTES", 20_000)
    pieces = pieces_of(TEMPLATES["default system"])
    most = 0
    for size in range(1, 80):
        assert pieces.text(conversation(*["x"] * size), VARIABLES) is not None
        most = max(most, pieces.cached_bytes)
    assert 20_000 < most < 50_000
    kept = pieces.cached_bytes
    assert pieces.text([{"role": "r" * 20_000, "content": "x"}], VARIABLES) is None, "roles of clients are long"
    assert pieces.text(conversation(*["x"] * 513), VARIABLES) is None
    assert pieces.cached_bytes == kept
