"""Chats put together around their contents: the template's text, where all it does with contents is to print them."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_incremental_render import ALTERNATING, BY_MESSAGE, CHATML_WITH_TOOLS, EACH, WHOLE, tokenizer
from transformers.utils.chat_template_utils import _compile_jinja_template

from indexer.errors import RequestError
from router.apis.message_normalization import prepare_messages
from router.apis.requests import ChatPrompt
from router.tokens.chat_template import ChatTemplate
from router.tokens.content_format import loops_over_parts, parsed
from router.tokens.opaque_texts import LookedAtError, OpaqueRendering, OpaqueText, Place
from worker.simulated.model.train import CHAT_TEMPLATE

PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text | trim }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
LLAMA = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + '<|eot|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
)
NOTES = (
    "{% set ns = namespace(system='', first=true) %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.system = m.content %}{% endif %}{% endfor %}"
    "{{ ns.system }}{% for m in messages | selectattr('role', 'equalto', 'user') %}{{ m.content.strip() }}"
    "{% if not loop.last and m.content and not m.content is none %},{{ (m.content or 'nothing') }}{% endif %}"
    "{% endfor %}{{ messages | map(attribute='role') | list | length }}{{ (messages | last).content }}"
)
# What a template may do beside, when it is not to a content.
OTHERWISE = (
    "{% for m in messages if m.role != 'tool' %}{{ m.role | upper }}{{ m.role ~ m['name'] }}{{ loop.length }}"
    "{{ m.content if m.content is iterable and m.content is not mapping else 'no' }}{{ 'content' in m }}"
    "{{ loop.previtem.role if loop.previtem }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
)
EVEN = [CHAT_TEMPLATE, EACH, CHATML_WITH_TOOLS, ALTERNATING, PARTS, LLAMA, NOTES, OTHERWISE]


def looking(what: str) -> str:
    return "{% for m in messages %}{% set c = m.content %}" + what + "{{ m.content }}{% endfor %}"


# Each looks at a content, or keeps what was printed.
LOOKING = [
    *map(
        looking,
        (
            "{{ c | upper }}",
            "{{ c | length }}",
            "{{ c | int }}",
            "{{ c | float }}",
            "{{ c | tojson }}",
            "{{ c | string }}",
            "{{ c | first }}",
            "{{ [c] | join }}",
            "{{ [c] | tojson }}",
            "{{ {'a': [c]} | items | list }}",
            "{{ c | list }}",
            "{{ (c + 'x') | trim }}",
            "{{ c | trim('x') }}",
            "{{ c | trim | length }}",
            "{% if c | trim %}x{% endif %}",
            "{{ c.strip() or 'x' }}",
            "{{ [m] | map(attribute='content') | map('upper') | list }}",
            "{{ [m] | selectattr('content', 'equalto', 'a') | list }}",
            "{{ [m] | sort(attribute='content') }}",
            "{{ c ~ 'x' }}",
            "{{ '%s' % c }}",
            "{{ '%d' % c }}",
            "{{ 'x' % c }}",
            "{{ '{}'.format(c) }}",
            "{{ c * 2 }}",
            "{{ 2 * c }}",
            "{{ c[0] }}",
            "{{ c[:3] }}",
            "{{ c['strip'] }}",
            "{{ c.upper() }}",
            "{{ c.strip('x') }}",
            "{{ c.split('x')[0] }}",
            "{{ c.startswith('x') }}",
            "{{ 'x'.startswith(c) }}",
            "{{ 'x'.join([c]) }}",
            "{{ 'x'.replace('x', c) }}",
            "{{ 'x' in c }}",
            "{{ c in 'x' }}",
            "{{ c in ['x'] }}",
            "{{ c in m }}",
            "{{ {'x': 1}[c] }}",
            "{{ {'x': 1}.get(c) }}",
            "{{ {c: 1} }}",
            "{{ c == 'x' }}",
            "{{ 'x' != c }}",
            "{{ c < 'x' }}",
            "{{ c is lower }}",
            "{{ c is in ['x'] }}",
            "{{ c is eq 'x' }}",
            "{{ c is sameas 'x' }}",
            "{{ m }}",
            "{{ m | string }}",
            "{{ [c] }}",
            "{{ '' ~ [c] }}",
            "{{ range(c) | list }}",
            "{{ c + 1 }}",
            "{{ 1 + c }}",
            "{{ c.anything is defined }}",
            "{% for letter in c %}{% endfor %}",
            "{% if c.find('x') %}{% endif %}",
            "{{ raise_exception(c) }}",
        ),
    ),
    "{% macro say(text) %}{{ text }}{% endmacro %}{% for m in messages %}{{ say(m.content) | length }}{% endfor %}",
    "{% for m in messages %}{% set said %}{{ m.content }}{% endset %}{{ said | length }}{% endfor %}",
    "{% for m in messages %}{% filter length %}{{ m.content }}{% endfilter %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ [1, 2] | random }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{{ strftime_now('%f') }}{% endfor %}",
    "{% for m in messages %}{% if loop.previtem and loop.previtem.content == m.content %}!{% endif %}{% endfor %}",
    "{% for m in messages %}{{ loop.changed(m.content) }}{% endfor %}",
]
ROLES = ("system", "user", "assistant", "user")


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, tokenizer())


def chat(contents: list[str], roles: tuple[str, ...] = ROLES, **fields: Any) -> ChatPrompt:
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    return ChatPrompt(messages, **fields)


def rendered(source: str, prompt: ChatPrompt) -> Any:
    """By transformers, of messages as vLLM prepares them."""
    wraps_parts = loops_over_parts(parsed(source))
    messages = prepare_messages(prompt.messages, wraps_parts=wraps_parts, knows_developer=False)
    answer = prompt.add_generation_prompt
    return tokenizer().apply_chat_template(messages, chat_template=source, add_generation_prompt=answer, tokenize=False)


def parts(source: str, roles: tuple[str, ...] = ROLES) -> list[str | Place] | None:
    """What the template prints of opaque contents."""
    environment = _compile_jinja_template(source).environment
    opaque = OpaqueRendering.of(source, environment)
    if opaque is None:
        return None
    messages = [{"role": role, "content": OpaqueText(Place(at, False))} for at, role in enumerate(roles)]
    given = {**environment.globals, **tokenizer().special_tokens_map, "add_generation_prompt": True}
    return opaque.parts({**given, "messages": messages})


@pytest.mark.parametrize("source", EVEN)
def test_templates_that_only_print_contents(source: str) -> None:
    roles = ROLES[1:] if source == ALTERNATING else ROLES
    found = parts(source, roles)
    assert found is not None
    assert any(isinstance(part, Place) for part in found)


@pytest.mark.parametrize("source", LOOKING)
def test_templates_that_look_at_contents_are_found_out(source: str) -> None:
    try:
        found = parts(source)
    except Exception:
        return
    # Where nothing raised, nothing depends on what the contents are: the template raises for all of them.
    assert found is None or "'x' % c" in source


def test_no_other_way_to_look_at_an_opaque_text() -> None:
    """Whatever a `str` can be asked."""
    text: Any = OpaqueText(Place(0, False))
    assert isinstance(text, str)
    for name in dir(str):
        if name in ("__class__", "__add__", "strip") or name in dir(object):
            continue
        with pytest.raises(LookedAtError):
            getattr(text, name)()
    for act in (str, repr, hash, len, iter, int, float, format, list, tuple, set, sorted, reversed, "".join, ord, dict):
        with pytest.raises((LookedAtError, TypeError)):
            act(text)


CONTENTS = st.one_of(
    st.sampled_from(["hi", " é\n", "", " ", "no", "stop", "<&>'\"", "{{ x }}", "</think>", "漢字", "a" * 300]),
    st.text(max_size=20),
)


@pytest.mark.parametrize("source", [*EVEN, *BY_MESSAGE, *WHOLE])
@settings(max_examples=10)
@given(
    contents=st.lists(CONTENTS, min_size=1, max_size=5),
    roles=st.lists(st.sampled_from(["system", "user", "assistant", "tool", "other"]), min_size=5, max_size=5),
    answer=st.booleans(),
)
def test_the_text_is_the_templates(source: str, contents: list[str], roles: list[str], answer: bool) -> None:
    if any(name in source for name in ("random", "strftime_now", "messages.count")):
        return  # never the same
    check(source, chat(contents, tuple(roles), add_generation_prompt=answer))


@pytest.mark.parametrize("source", LOOKING)
def test_what_looks_at_contents_is_shown_them(source: str) -> None:
    if any(name in source for name in ("random", "strftime_now")):
        return
    for contents in (["x", "a", "a"], [" 5 ", "x"]):
        check(source, chat(contents))


def check(source: str, prompt: ChatPrompt) -> None:
    """It is rendered as by the template, also the second time."""
    for _ in range(2):
        try:
            expected = rendered(source, prompt)
        except Exception:
            with pytest.raises(RequestError):
                template(source).render(prompt)
        else:
            assert template(source).render(prompt) == expected


def test_many_orders_of_roles_and_long_chats() -> None:
    one = template(EACH)
    for number in range(1200):
        roles = tuple(ROLES[number >> 2 * place & 3] for place in range(6))
        contents = [f"{number} {place}" for place in range(6)]
        expected = "".join(f"<{role}>{content}" for role, content in zip(roles, contents, strict=True))
        assert one.render(chat(contents, roles)) == expected
    long = ("user", "assistant") * 100
    assert one.render(chat(["x"] * 200, long)) == "".join(f"<{role}>x" for role in long)


def test_what_the_client_sets_is_heeded() -> None:
    one = template(EACH + "{{ color }}{{ tools | length if tools }}{{ add_generation_prompt }}")
    assert one.render(chat(["a"])) == "<system>aTrue"
    assert one.render(chat(["a"], add_generation_prompt=False)) == "<system>aFalse"
    assert one.render(chat(["a"], chat_template_kwargs={"color": "red"})) == "<system>aredTrue"
    assert one.render(chat(["a"], tools=[{}])) == "<system>a1True"
    billed = chat(["x-anthropic-billing-header: 5\nrest"])
    assert one.render(billed) == "<system>restTrue"
    assert one.render(ChatPrompt([{"role": "developer", "content": "a"}])) == "<system>aTrue"
