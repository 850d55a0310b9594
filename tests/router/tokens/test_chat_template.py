"""Input and output of chat templates. The expected values were read from vLLM."""

from __future__ import annotations

import contextlib
import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from http_api.errors import RequestError
from router.apis.message_normalization import prepare_messages, prepare_tools
from router.apis.requests import ChatPrompt
from router.tokens.chat_template import ChatTemplate, Sandbox

# Shows what the template sees, for templates that take a content as a string and for those that loop over its parts.
SHOW = "{{ messages | tojson }}"
SHOW_PARTS = "{% for message in messages %}{% for part in message.content %}{% endfor %}{% endfor %}" + SHOW

WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": {"type": "object", "b": 1, "a": 2}},
}
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), bos_token="<s>", eos_token="</s>"
    )


def seen(tokenizer: PreTrainedTokenizerFast, *messages: dict[str, Any], source: str = SHOW) -> Any:
    """The messages as the template sees them."""
    return json.loads(ChatTemplate(source, tokenizer.special_tokens_map).render(ChatPrompt(list(messages))))


@pytest.mark.parametrize(
    ("content", "as_string", "as_parts"),
    [
        ("hi", "hi", [{"type": "text", "text": "hi"}]),
        ("", "", [{"type": "text", "text": ""}]),
        ("  spaced \n", "  spaced \n", [{"type": "text", "text": "  spaced \n"}]),
        (None, "", []),
        ([], "", []),
        (
            [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}],
            "a\n b",
            [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}],
        ),
        (["a", "b"], "a\nb", [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]),
        (
            [{"text": "a", "type": "text", "cache_control": {"type": "ephemeral"}}],
            "a",
            [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}],
        ),
        (
            [{"type": "refusal", "refusal": "no"}, {"type": "thinking", "thinking": "hm", "closed": True}],
            "no\nhm",
            [{"type": "text", "text": "no"}, {"type": "text", "text": "hm"}],
        ),
        (
            [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text", "text": "what?"}],
            "what?",
            [{"type": "image"}, {"type": "text", "text": "what?"}],
        ),
        ([{"audio_url": "data:"}, {"type": "video_url"}], "", [{"type": "audio"}, {"type": "video"}]),
        ([{"type": "hologram"}, {"type": "text", "text": None}], "", []),
    ],
)
def test_contents_of_messages_are_converted_for_the_template(
    tokenizer: PreTrainedTokenizerFast, content: Any, as_string: str, as_parts: list[Any]
) -> None:
    message = {"role": "user", "content": content}
    assert seen(tokenizer, message) == [{"role": "user", "content": as_string}]
    assert seen(tokenizer, message, source=SHOW_PARTS) == [{"role": "user", "content": as_parts}]


def test_message_has_keys_of_vllm_in_its_order(tokenizer: PreTrainedTokenizerFast) -> None:
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
    assert ChatTemplate(SHOW, tokenizer.special_tokens_map).render(ChatPrompt(messages)) == json.dumps(
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


def test_messages_of_clients_are_not_modified(tokenizer: PreTrainedTokenizerFast) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "developer", "content": [{"type": "text", "text": "d"}]},
        {"role": "assistant", "tool_calls": [call]},
    ]
    before = json.dumps(messages)
    seen(tokenizer, *messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("{not json", {}),
        ("[1]", {}),
        ("5", {}),
    ],
)
def test_arguments_of_tool_calls_are_parsed_to_an_object(
    tokenizer: PreTrainedTokenizerFast, arguments: Any, expected: Any
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    (message,) = seen(tokenizer, {"role": "assistant", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == expected


@pytest.mark.parametrize("calls", [[], None])
def test_empty_tool_calls_are_omitted(tokenizer: PreTrainedTokenizerFast, calls: Any) -> None:
    assert seen(tokenizer, {"role": "assistant", "content": "a", "tool_calls": calls}) == [
        {"role": "assistant", "content": "a"}
    ]


@pytest.mark.parametrize(
    "given", [{"reasoning": "hm"}, {"reasoning_content": "hm"}, {"reasoning": "hm", "reasoning_content": "no"}]
)
def test_reasoning_has_both_of_its_names(tokenizer: PreTrainedTokenizerFast, given: dict[str, str]) -> None:
    (message,) = seen(tokenizer, {"role": "assistant", "content": "a"} | given)
    assert (message["reasoning"], message["reasoning_content"]) == ("hm", "hm")


def test_answer_of_a_tool_is_one_text_in_both_content_formats(tokenizer: PreTrainedTokenizerFast) -> None:
    message = {"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert seen(tokenizer, message, source=SHOW_PARTS) == [{"role": "tool", "content": "a\nb"}]
    reference = {"role": "tool", "content": [{"type": "tool_reference", "name": "f"}]}
    assert seen(tokenizer, reference, source=SHOW_PARTS) == [reference]
    assert seen(tokenizer, reference) == [{"role": "tool", "content": "f"}]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("x-anthropic-billing-header: 1\nbe brief\nnow", "be brief\nnow"),
        ("x-anthropic-billing-header: 1", ""),
        ([{"type": "text", "text": "x-anthropic-billing-header: 1\nbe"}, "brief"], "be\nbrief"),
        (["x-anthropic-billing-header: 1", {"type": "text", "text": "brief"}], "brief"),
    ],
)
def test_line_that_changes_with_each_request_is_dropped(
    tokenizer: PreTrainedTokenizerFast, content: Any, expected: str
) -> None:
    user = {"role": "user", "content": "x-anthropic-billing-header: 1\nhi"}
    assert seen(tokenizer, {"role": "system", "content": content}, user) == [
        {"role": "system", "content": expected},
        user,
    ]


DEVELOPER = {"role": "developer", "content": "d", "tools": [{"function": {"name": "f"}, "type": "function"}]}


def test_developer_becomes_system_if_template_has_no_developer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert seen(tokenizer, DEVELOPER, USER) == [{"role": "system", "content": "d"}, USER]
    system = {"role": "system", "content": "s"}
    assert seen(tokenizer, system, USER, DEVELOPER) == [{"role": "system", "content": "s\n\nd"}, USER]
    assert seen(tokenizer, USER, DEVELOPER, source=SHOW_PARTS)[0] == {"role": "system", "content": "d"}


def test_developer_is_kept_if_template_has_it(tokenizer: PreTrainedTokenizerFast) -> None:
    assert seen(tokenizer, USER, DEVELOPER, source=SHOW + "{# 'developer' #}") == [USER, DEVELOPER]


def test_system_messages_are_not_merged_without_a_developer(tokenizer: PreTrainedTokenizerFast) -> None:
    system = {"role": "system", "content": "s"}
    assert seen(tokenizer, USER, system) == [USER, system]


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
    ("chat", "expected"),
    [
        (ChatPrompt([USER]), ["<s>", True, None, None, None, None, None]),
        (ChatPrompt([USER], add_generation_prompt=False), ["<s>", False, None, None, None, None, None]),
        (ChatPrompt([USER], reasoning_effort="low"), ["<s>", True, True, "low", None, None, None]),
        (ChatPrompt([USER], reasoning_effort="none"), ["<s>", True, False, "none", None, None, None]),
        (
            ChatPrompt([USER], reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}),
            ["<s>", True, False, "low", None, None, None],
        ),
        (
            ChatPrompt([USER], documents=[{"text": "d"}], chat_template_kwargs={"color": "red", "unread": 1}),
            ["<s>", True, None, None, [{"text": "d"}], None, "red"],
        ),
        (
            ChatPrompt(
                [USER], chat_template_kwargs={"bos_token": "<B>", "add_generation_prompt": False, "color": None}
            ),
            ["<B>", True, None, None, None, None, None],
        ),
        (
            ChatPrompt(
                [USER], chat_template_kwargs={"tools": [WEATHER], "documents": [{"text": "k"}], "color": "auto"}
            ),
            ["<s>", True, None, None, [{"text": "k"}], [WEATHER], None],
        ),
        (
            ChatPrompt(
                [USER], chat_template_kwargs={"messages": [], "tokenize": True, "padding": True, "conversation": 1}
            ),
            ["<s>", True, None, None, None, None, None],
        ),
    ],
)
def test_template_receives_variables_of_the_request(
    tokenizer: PreTrainedTokenizerFast, chat: ChatPrompt, expected: list[Any]
) -> None:
    source = "{%- macro say(x) -%}{{ 'null' if x is undefined else x | tojson }}{%- endmacro -%}["
    names = ["bos_token", "add_generation_prompt", "enable_thinking", "reasoning_effort", "documents", "tools", "color"]
    source += ",".join(f"{{{{ say({name}) }}}}" for name in names) + "]"
    assert json.loads(ChatTemplate(source, tokenizer.special_tokens_map).render(chat)) == expected


def test_last_message_can_be_continued() -> None:
    template = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}")
    messages = [USER, {"role": "assistant", "content": "well,"}]
    chat = ChatPrompt(messages, add_generation_prompt=False, continue_final_message=True)
    assert template.render(chat) == "<user>hi</><assistant>well,"


def test_generation_blocks_and_loop_controls_are_supported(tokenizer: PreTrainedTokenizerFast) -> None:
    body = "{% if loop.index > 1 %}{% break %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}"
    source = "{% for m in messages %}" + body + "{% endfor %}"
    assert ChatTemplate(source, tokenizer.special_tokens_map).render(ChatPrompt([USER, USER])) == "hi"


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
def test_refusal_has_the_message_of_the_template(
    tokenizer: PreTrainedTokenizerFast, source: str, chat: ChatPrompt, phrase: str
) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(source, tokenizer.special_tokens_map).render(chat)
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


# The machine may be busy: how long an example takes says nothing here.
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    messages=st.lists(MESSAGE, min_size=1, max_size=3),
    tools=st.none() | st.lists(TOOL | ANY_JSON, max_size=2),
    variables=st.none() | st.dictionaries(st.sampled_from(["tools", "documents", "color", "messages"]), ANY_JSON),
    source=st.sampled_from([SHOW, SHOW_PARTS, SHOW + "{# 'developer' #}"]),
)
def test_any_messages_of_a_client_are_rendered_or_refused(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any] | None,
    source: str,
) -> None:
    with contextlib.suppress(RequestError):
        ChatTemplate(source, tokenizer.special_tokens_map).render(
            ChatPrompt(messages, tools=tools, chat_template_kwargs=variables)
        )


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    messages=st.lists(MESSAGE, min_size=1, max_size=3),
    tools=st.none() | st.lists(TOOL, max_size=2),
    color=ANY_JSON,
    add_generation_prompt=st.booleans(),
    wraps_parts=st.booleans(),
)
def test_text_equals_that_of_transformers(
    tokenizer: PreTrainedTokenizerFast,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    color: Any,
    add_generation_prompt: bool,
    wraps_parts: bool,
) -> None:
    source = (SHOW_PARTS if wraps_parts else SHOW) + "{{ [tools, color, bos_token, add_generation_prompt] | tojson }}"
    chat = ChatPrompt(
        messages,
        tools=tools,
        chat_template_kwargs={"color": color},
        add_generation_prompt=add_generation_prompt,
    )
    prepared = prepare_messages(messages, wraps_parts=wraps_parts, knows_developer=False)
    shown = {} if color is None or color == "auto" else {"color": color}

    def expected() -> str:
        text: str = tokenizer.apply_chat_template(
            prepared,
            tools=prepare_tools(tools),
            chat_template=source,
            add_generation_prompt=add_generation_prompt,
            tokenize=False,
            **shown,
        )
        return text

    def outcome(render: Callable[[], str]) -> str | None:
        try:
            return render()
        except Exception:  # whatever the template makes of what it was not written for
            return None

    assert outcome(lambda: ChatTemplate(source, tokenizer.special_tokens_map).render(chat)) == outcome(expected)


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
