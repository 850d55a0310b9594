"""Input and output of chat templates, and the content format that a template calls for.

The expected values were read from vLLM.
"""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from played_engine import with_template
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from http_api.errors import RequestError
from router.apis.messages import prepare_messages, prepare_tools
from router.apis.requests import ChatPrompt
from router.tokens.chat_template import ChatTemplate
from router.tokens.content_format import loops_over_parts
from router.tokens.template_environment import Sandbox

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
# Shows what the template sees, for templates that take a content as a string and for those that loop over its parts.
SHOW = "{{ messages | tojson }}"
SHOW_PARTS = "{% for message in messages %}{% for part in message.content %}{% endfor %}{% endfor %}" + SHOW

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object", "b": 1, "a": 2}},
}
USER = {"role": "user", "content": "hi"}


def text(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": text} | more


def rendered(source: str, chat: ChatPrompt) -> str:
    return ChatTemplate(source, SPECIAL).render(chat)


def seen(*messages: dict[str, Any], source: str = SHOW) -> Any:
    """Return the messages as the template sees them."""
    return json.loads(rendered(source, ChatPrompt(list(messages))))


@pytest.mark.parametrize(
    ("content", "as_string", "as_parts"),
    [
        *((given, given, [text(given)]) for given in ("hi", "", "  spaced \n")),
        (None, "", []),
        ([], "", []),
        ([text("a"), text(" b")], "a\n b", [text("a"), text(" b")]),
        (["a", "b"], "a\nb", [text("a"), text("b")]),
        ([text("a", cache_control={"type": "ephemeral"})], "a", [text("a", cache_control={"type": "ephemeral"})]),
        (
            [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm", "closed": True}],
            "no\nhm",
            [text("no"), text("hm")],
        ),
        (
            [{"type": "image_url", "image_url": {"url": "data:"}}, text("what?")],
            "what?",
            [{"type": "image"}, text("what?")],
        ),
        ([{"audio_url": "data:"}, {"type": "video_url"}], "", [{"type": "audio"}, {"type": "video"}]),
        ([{"type": "hologram"}, {"type": "text", "text": None}], "", []),
    ],
)
def test_contents_of_messages_are_converted_for_the_template(content: Any, as_string: str, as_parts: list[Any]) -> None:
    message = {"role": "user", "content": content}
    assert seen(message) == [{"role": "user", "content": as_string}]
    assert seen(message, source=SHOW_PARTS) == [{"role": "user", "content": as_parts}]


def test_message_has_keys_of_vllm_in_its_order() -> None:
    call = {
        "type": "function",
        "extra": 1,
        "function": {"name": "weather", "arguments": '{"unit": "c", "city": "Köln"}'},
        "id": "call_1",
    }
    messages: list[dict[str, Any]] = [
        {"name": "ann", "tool_calls": [call], "content": None, "role": "assistant", "refusal": None, "audio": {}},
        {"content": "12°", "name": "weather", "tool_call_id": "call_1", "role": "tool", "extra": 1},
        {"task": "t", "content": "u", "role": "user", "tool_call_id": "call_1", "name": 5},
    ]
    assert rendered(SHOW, ChatPrompt(messages)) == json.dumps(
        [
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call_1",
                        "function": {"arguments": {"unit": "c", "city": "Köln"}, "name": "weather"},
                        "type": "function",
                        "extra": 1,
                    }
                ],
                "name": "ann",
            },
            {"role": "tool", "content": "12°", "tool_call_id": "call_1", "name": "weather"},
            {"role": "user", "content": "u", "task": "t"},
        ],
        ensure_ascii=False,
    )


def test_messages_of_clients_are_not_modified() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "assistant", "tool_calls": [call]},
    ]
    before = json.dumps(messages)
    seen(*messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [('{"a": 1}', {"a": 1}), ({"a": 1}, {"a": 1}), ("", {}), (None, {}), ("{not json", {}), ("[1]", {}), ("5", {})],
)
def test_arguments_of_tool_calls_are_parsed_to_an_object(arguments: Any, expected: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = seen({"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize("calls", [[], None])
def test_empty_tool_calls_are_omitted(calls: Any) -> None:
    assert seen({"role": "assistant", "content": "a", "tool_calls": calls}) == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    "given", [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": "hm", "reasoning_content": "no"}]
)
def test_reasoning_has_both_of_its_names(given: dict[str, str]) -> None:
    (message,) = seen({"role": "assistant", "content": "a"} | given)
    assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")


def test_answer_of_a_tool_is_one_text_in_both_content_formats() -> None:
    message = {"role": "tool", "content": [text("a"), text("b")]}
    assert seen(message, source=SHOW_PARTS) == [{"role": "tool", "content": "a\nb"}]
    reference = {"role": "tool", "content": [{"type": "tool_reference", "name": "f"}]}
    assert seen(reference, source=SHOW_PARTS) == [reference]
    assert seen(reference) == [{"role": "tool", "content": "f"}]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("x-anthropic-billing-header: 1\nbe brief\nnow", "be brief\nnow"),
        ("x-anthropic-billing-header: 1", ""),
        ([text("x-anthropic-billing-header: 1\nbe"), "brief"], "be\nbrief"),
        (["x-anthropic-billing-header: 1", text("brief")], "brief"),
    ],
)
def test_line_that_changes_with_each_request_is_dropped(content: Any, expected: str) -> None:
    user = {"role": "user", "content": "x-anthropic-billing-header: 1\nhi"}
    assert seen({"role": "system", "content": content}, user) == [{"role": "system", "content": expected}, user]


DEVELOPER = {"role": "developer", "content": "d", "tools": [{"function": {"name": "f"}, "type": "function"}]}


def test_developer_becomes_system_unless_the_template_has_it() -> None:
    assert seen(DEVELOPER, USER) == [{"role": "system", "content": "d"}, USER]
    system = {"role": "system", "content": "s"}
    assert seen(USER, system) == [USER, system], "system messages are not merged without a developer"
    assert seen(system, USER, DEVELOPER) == [{"role": "system", "content": "s\n\nd"}, USER]
    assert seen(USER, DEVELOPER, source=SHOW_PARTS)[0] == {"role": "system", "content": "d"}
    assert seen(USER, DEVELOPER, source=SHOW + "{# 'developer' #}") == [USER, DEVELOPER]


def test_tools_have_keys_of_vllm_in_its_order() -> None:
    tools: list[dict[str, Any]] = [
        WEATHER | {"extra": 1},
        {"function": {"strict": False, "name": "f", "extra": 1}},
        {"type": "function", "function": {"name": "g"}, "defer_loading": True},
    ]
    rendered = ChatTemplate("{{ tools | tojson }}").render(ChatPrompt([USER], tools=tools))
    nothing = {"description": None, "parameters": None}
    assert rendered == json.dumps(
        [
            WEATHER,
            {"type": "function", "function": {"name": "f", **nothing, "strict": False}},
            {"type": "function", "function": {"name": "g", **nothing, "defer_loading": True}, "defer_loading": True},
        ]
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"reasoning_effort": "low"}, {"enable_thinking": True, "reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"enable_thinking": False, "reasoning_effort": "none"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}},
            {"enable_thinking": False, "reasoning_effort": "low"},
        ),
        (
            {"documents": [{"text": "d"}], "chat_template_kwargs": {"color": "red", "unread": 1}},
            {"documents": [{"text": "d"}], "color": "red"},
        ),
        (
            {"chat_template_kwargs": {"bos_token": "<B>", "add_generation_prompt": False, "color": None}},
            {"bos_token": "<B>"},
        ),
        (
            {"chat_template_kwargs": {"tools": [WEATHER], "documents": [{"text": "k"}], "color": "auto"}},
            {"tools": [WEATHER], "documents": [{"text": "k"}]},
        ),
        ({"chat_template_kwargs": {"messages": [], "tokenize": True, "padding": True, "conversation": 1}}, {}),
    ],
)
def test_template_receives_variables_of_the_request(options: dict[str, Any], expected: dict[str, Any]) -> None:
    source = "{%- macro say(x) -%}{{ 'null' if x is undefined else x | tojson }}{%- endmacro -%}["
    names = ["bos_token", "add_generation_prompt", "enable_thinking", "reasoning_effort", "documents", "tools", "color"]
    source += ",".join(f"{{{{ say({name}) }}}}" for name in names) + "]"
    defaults = dict.fromkeys(names) | {"bos_token": "<s>", "add_generation_prompt": True}
    assert (
        dict(zip(names, json.loads(rendered(source, ChatPrompt([USER], **options))), strict=True))
        == defaults | expected
    )


def test_last_message_can_be_continued() -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}")
    messages = [USER, {"role": "assistant", "content": "well,"}]
    chat = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    assert template.render(chat) == "<user>hi</><assistant>well,"


def test_generation_blocks_and_loop_controls_are_supported() -> None:
    body = "{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}"
    assert rendered("{% for m in messages %}" + body + "{% endfor %}", ChatPrompt([USER, USER])) == "hi"


@pytest.mark.parametrize(
    ("source", "chat", "phrase"),
    [
        ("{{ raise_exception('roles must alternate') }}", ChatPrompt([USER]), "roles must alternate"),
        ("{{ messages[5].content }}", ChatPrompt([USER]), "no element 5"),
        ("{{ 'a' + tools }}", ChatPrompt([USER]), "concatenate"),
        (SHOW, ChatPrompt([USER], continue_final_message=True), "add_generation_prompt"),
        (SHOW, ChatPrompt([USER], chat_template_kwargs={"tools": ["hammer"]}), "JSON schema"),
    ],
)
def test_refusal_has_the_message_of_the_template(source: str, chat: ChatPrompt, phrase: str) -> None:
    with pytest.raises(RequestError) as caught:
        rendered(source, chat)
    assert (caught.value.status, caught.value.param) == (400, "messages")
    assert phrase in caught.value.message


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
PART = st.fixed_dictionaries({}, optional=dict.fromkeys(("type", "text", "refusal", "image_url", "name"), ANY_JSON))
FUNCTION = st.fixed_dictionaries({}, optional=dict.fromkeys(("name", "arguments", "parameters"), ANY_JSON))
TOOL = st.fixed_dictionaries(
    {}, optional={"type": ANY_JSON, "function": FUNCTION | ANY_JSON, "defer_loading": ANY_JSON}
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "other"])},
    optional={
        "content": st.none() | st.text(max_size=5) | st.lists(st.text(max_size=5) | PART, max_size=3),
        "tool_calls": st.lists(TOOL | ANY_JSON, max_size=2) | ANY_JSON,
        "tools": st.lists(TOOL | ANY_JSON, max_size=2) | ANY_JSON,
        "reasoning": ANY_JSON,
        "name": ANY_JSON,
    },
)


CHATS = st.builds(
    ChatPrompt,
    st.lists(MESSAGE, min_size=1, max_size=3),
    tools=st.none() | st.lists(TOOL | ANY_JSON, max_size=2),
    chat_template_kwargs=st.none()
    | st.dictionaries(st.sampled_from(["tools", "documents", "color", "messages"]), ANY_JSON),
    add_generation_prompt=st.booleans(),
)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(CHATS, st.sampled_from([SHOW, SHOW_PARTS, SHOW + "{# 'developer' #}"]))
def test_any_messages_of_a_client_are_rendered_or_refused(chat: ChatPrompt, source: str) -> None:
    with contextlib.suppress(RequestError):
        rendered(source, chat)


@cache
def reference() -> Any:
    """Return the tokenizer of transformers, whose import takes a second."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), **SPECIAL)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(CHATS, st.none() | st.lists(TOOL, max_size=2), ANY_JSON, st.booleans())
def test_text_equals_that_of_transformers(
    chat: ChatPrompt, tools: list[dict[str, Any]] | None, color: Any, wraps_parts: bool
) -> None:
    source = (SHOW_PARTS if wraps_parts else SHOW) + "{{ [tools, color, bos_token, add_generation_prompt] | tojson }}"
    chat = replace(chat, tools=tools, chat_template_kwargs={"color": color})
    prepared = prepare_messages(chat.messages, wraps_parts=wraps_parts, knows_developer=False)
    shown = {} if color is None or color == "auto" else {"color": color}

    def expected() -> str:
        text: str = reference().apply_chat_template(
            prepared,
            tools=None if tools is None else prepare_tools(tools),
            chat_template=source,
            add_generation_prompt=chat.add_generation_prompt,
            tokenize=False,
            **shown,
        )
        return text

    def outcome(render: Callable[[], str]) -> str | None:
        try:
            return render()
        except Exception:  # whatever the template makes of what it was not written for
            return None

    assert outcome(lambda: rendered(source, chat)) == outcome(expected)


@pytest.mark.parametrize("name", ["role", "missing", "items", "get", "__class__", "pop", "1", "", 1, ("a",), ["a"]])
@pytest.mark.parametrize("value", [{"role": "user", "items": 2}, {}, OrderedDict(role="user"), [7, 8], "text", None])
def test_fields_are_found_like_in_jinja(value: Any, name: Any) -> None:
    ours, jinjas = Sandbox(), ImmutableSandboxedEnvironment()
    assert shown(ours.getitem(value, name)) == shown(jinjas.getitem(value, name))
    if isinstance(name, str):
        assert shown(ours.getattr(value, name)) == shown(jinjas.getattr(value, name))


def shown(value: Any) -> str:
    """Return a value's type and text; for an undefined value also the reason."""
    if isinstance(value, jinja2.Undefined):
        return f"{type(value)} {value._undefined_message} {value._undefined_exception}"
    return f"{type(value)} {value}"


END = "{% endfor %}{% endfor %}"
LOOPS = [
    "{% for m in messages %}{% for p in m.content %}" + END,
    "{% for m in messages %}{% for p in m['content'] %}" + END,
    "{% for m in messages %}{% if m.content is mapping %}{% endif %}{% for p in m.content | list %}" + END,
    "{% for m in messages[1:] %}{% for p in m.content[:2] %}" + END,
    "{% set turns = messages[1:] %}{% set late = turns %}{% for m in late %}{% for p in m.content %}" + END,
    "{% for m in messages %}{% set content = m.content %}{% for p in content %}" + END,
    "{% macro show(x) %}{% for p in x %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    "{% macro show(y, x) %}{% for p in x %}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(1, x=m.content) }}{% endfor %}",
]
NO_LOOPS = [
    "",
    "{{ messages }}",
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for call in m.tool_calls %}" + END,
    "{% for t in tools %}{% for p in t.content %}" + END,
    "{% for m in messages %}{% for p in m.content.parts %}" + END,
    "{% for m in messages %}{% for p in m[0] %}" + END,
    "{% macro show(content) %}{% for p in content %}{% endfor %}{% endmacro %}{{ show(tools) }}",
    # What vLLM cannot follow: targets that are not one plain name.
    "{% for m in messages %}{% for a, b in m.content %}" + END,
    "{% set ns = namespace() %}{% set ns.m = messages %}{% for m in messages %}{% for p in m.content %}" + END,
]


@pytest.mark.parametrize(
    ("source", "loops"), [*((source, True) for source in LOOPS), *((source, False) for source in NO_LOOPS)]
)
def test_templates_receive_parts_if_they_loop_over_the_content(source: str, loops: bool) -> None:
    assert loops_over_parts(jinja2.Environment().parse(source)) is loops


ANYWHERE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
FIRST = ANYWHERE.replace("<", "{% if m.role == 'system' and not loop.first %}{{ raise_exception('No.') }}{% endif %}<")
THINKS = ANYWHERE + "{% if enable_thinking is defined %}[{{ enable_thinking }}]{% endif %}"
REFUSES_NONE = (
    ANYWHERE + "{% if reasoning_effort == 'none' %}{{ raise_exception('No.') }}{% endif %}{{ reasoning_effort }}"
)
TWO_SYSTEMS = [{"role": "system", "content": "One."}, USER, {"role": "system", "content": "Two."}]


@pytest.mark.parametrize(
    ("template", "both", "second"),
    [
        (ANYWHERE, "<system>One.<user>hi<system>Two.", "<user>hi<system>Two."),
        (FIRST, "<system>One.Two.<user>hi", "<system>Two.<user>hi"),
    ],
)
def test_system_messages_are_merged_if_template_accepts_only_one(template: str, both: str, second: str) -> None:
    assert with_template(template).render(ChatPrompt(TWO_SYSTEMS, merges_system=True)) == both
    assert with_template(template).render(ChatPrompt(TWO_SYSTEMS[1:], merges_system=True)) == second


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (THINKS, "<user>hi[False]"),  # it knows "none"
        (ANYWHERE, "<user>hi"),
        (REFUSES_NONE, "<user>hilow"),
    ],
)
def test_thinking_is_disabled_by_the_variable_of_the_template(template: str, text: str) -> None:
    assert with_template(template).render(ChatPrompt([USER], thinking_off=True)) == text
