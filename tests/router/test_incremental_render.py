"""Templates that render message by message: which they are, and that a conversation's next turn is the whole's text."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from indexer.errors import RequestError
from router.apis.body_cache import MIN_BYTES, BodyCache
from router.apis.openai_requests import decode_chat
from router.apis.requests import ChatPrompt
from router.tokens.chat_template import ChatTemplate
from worker.simulated.model.train import CHAT_TEMPLATE

LONG = "You hold the cache of the prefix. " * (MIN_BYTES // 30)
EACH = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# As many models have it: a system message of its own, and the answers of tools put together.
CHATML_WITH_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant' }}
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}
{%- if call.function is defined %}{% set call = call.function %}{% endif %}
{{- '\\n<tool_call>' + call.name + (call.arguments | tojson) }}
{%- endfor %}{{ '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>' + message.content }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
ALTERNATING = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Alternate') }}"
    "{% endif %}{% set role = 'model' if m.role == 'assistant' else m.role %}<{{ role }}>{{ m.content | trim }}"
    "{% endfor %}"
)
BY_MESSAGE = [
    CHAT_TEMPLATE,
    EACH,
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}"
    + EACH
    + "{% if add_generation_prompt %}<assistant>{% endif %}",
    # What is set in the loop is gone with its message.
    "{% for m in messages %}{% if m.role == 'user' %}{% set last = m.content %}{% endif %}{{ last }},{% endfor %}",
    "{% set hello = 'hi' %}{{ hello }}{% for m in messages %}{% set x = color %}{{ x }}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content | trim | upper }}{% endfor %}{{ color }}",
    "{% for m in messages %}{% set color = (color or '') ~ 'x' %}{{ color }}{% endfor %}{{ color }}",
    "{% for m in messages %}{{ n }}{% for n in 'a' %}{% set p = n %}{% endfor %}{{ p }}{% set n = 2 %}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for part in [1, 2] %}{{ loop.index }}{{ part }}{% endfor %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% if m.content == 'no' %}{{ raise_exception('') }}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% endfor %}nothing",
    # Where in the conversation a message stands, and the first message.
    "{% for m in messages %}{{ loop.index }}/{{ loop.index0 % 2 }}{{ loop.first }}{{ m.content }}{% endfor %}",
    "{{ messages[0].role }}"
    + EACH
    + "{{ messages | length }}{{ messages[-1].role }}{% for m in messages[1:] %}.{% endfor %}",
    "{% for m in messages %}{{ messages[0].content }}{% endfor %}",
    "{% for m in messages %}{% for n in m.content if n %}{{ loop.index0 }}{% endfor %}{{ loop.first }}{% endfor %}",
    # The message before, and the one after.
    "{% for m in messages %}{{ m.content }}{% if loop.last %}.{% else %},{% endif %}{% endfor %}{{ color }}",
    "{% for m in messages %}{{ m.content }}{% if not loop.last %}{{ loop.nextitem.role }}"
    "{{ messages[loop.index].role }}{% endif %}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% if messages[loop.index0 + 1] is defined %},{% endif %}{% endfor %}",
    "{% for m in messages %}{% for part in [loop.last] %}{{ part }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% if loop.last %}.{% endif %}{% for n in [1] %}{{ loop.index }}{% endfor %}{% endfor %}",
    CHATML_WITH_TOOLS,
    ALTERNATING,
]
WHOLE = [
    "{{ messages | tojson }}",
    "{{ messages[1].role }}" + EACH,
    "{{ messages[-1].role }}" + EACH,
    "{{ messages | length }}" + EACH,
    "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ loop.length }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem }}{% endfor %}",
    "{% for m in messages %}{{ loop['index'] }}{% endfor %}",
    "{% for m in messages %}{{ loop }}{% endfor %}",
    "{% for m in messages %}{{ loop.cycle(1, 2) }}{% endfor %}",
    "{% for m in messages %}{{ messages[-1].role }}{% endfor %}",
    "{% for m in messages %}{{ messages[loop.index0 - 1].role }}{% endfor %}",
    "{% for m in messages %}{{ messages[loop.index + 1].role }}{% endfor %}",
    "{% for m in messages %}{{ messages[1:] | length }}{% endfor %}",
    "{% for m in messages %}{{ messages.count }}{% endfor %}",
    "{% for m in messages %}{% set messages = [] %}{% endfor %}",
    "{% for m in messages %}{{ kvrouter_skipped }}{% endfor %}",
    "{% for m in messages %}{% for n in [1] if loop %}{{ n }}{% endfor %}{% endfor %}",
    "{% for m in messages[1:] %}{{ m.content }}{% endfor %}",
    "{% set all = messages %}{% for m in all %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ m.content }}{% else %}nobody{% endfor %}",
    "{% for m in messages recursive %}{{ m.content }}{% endfor %}",
    "{% if tools %}" + EACH + "{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{{ m.content }}{% endfor %}{{ ns.n }}",
    "{% set it = [1, 2, 3] | map('string') %}{% for m in messages %}{{ it | first }}{% endfor %}",
    "{% set end = '!' %}{% for m in messages %}{{ m.content }}{% endfor %}{{ end }}",
    "{% set c = cycler('a', 'b') %}{% for m in messages %}{{ c.next() }}{% endfor %}",
    "{% for m in messages %}{% if m.content == 'stop' %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{{ [1, 2] | random }}{% endfor %}",
    "{{ strftime_now('%Y') }}" + EACH,
    "{% macro say(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% for m in messages %}{% filter upper %}{{ m.content }}{% endfilter %}{% endfor %}",
    "no messages",
]


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"a": 0}, "a")), bos_token="<s>", eos_token="</s>"
    )


@cache
def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, tokenizer())


def prompt(seen: BodyCache | None, messages: list[dict[str, Any]], **fields: Any) -> ChatPrompt:
    body = json.dumps({"model": "m", "messages": messages, **fields}).encode()
    found = decode_chat(body, (), seen).prompt
    assert isinstance(found, ChatPrompt)
    return found


def text(source: str, chat: ChatPrompt) -> str:
    try:
        return template(source).render(chat)
    except RequestError as error:
        return error.message


@pytest.mark.parametrize(("source", "by_message"), [(s, True) for s in BY_MESSAGE] + [(s, False) for s in WHOLE])
def test_which_templates_render_message_by_message(source: str, by_message: bool) -> None:
    roles = ("user", "assistant", "user")
    # With tools, since chats of texts alone need no rendering (router/tokens/skeletons.py).
    chat = prompt(BodyCache(), [{"role": role, "content": LONG} for role in roles], tools=[TOOL])
    text(source, chat)
    assert chat.conversation is not None
    assert (chat.conversation.rendering is not None) == by_message


TOOL = {"type": "function", "function": {"name": "f"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
MESSAGES = st.sampled_from(
    [
        *({"role": role, "content": content} for role in ("user", "assistant", "tool") for content in ("hi", " é\n")),
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": "a", "reasoning_content": "hm"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "no"},
        {"role": "user", "content": "stop"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
        {"role": "tool", "content": "x", "tool_call_id": None},
    ]
)
FIELDS = st.sampled_from(
    [
        *[{}] * 5,
        {"tools": [TOOL]},
        {"chat_template_kwargs": {"color": 1}},
        {"chat_template_kwargs": {"color": True}},
        {"chat_template_kwargs": {"color": 1.0, "bos_token": "<B>"}},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"documents": [{"text": "d"}]},
    ]
)


@pytest.mark.parametrize("source", [*BY_MESSAGE, WHOLE[1]])
@settings(max_examples=25)
@given(turns=st.lists(st.tuples(st.integers(1, 12), st.lists(MESSAGES, max_size=3), FIELDS), min_size=2, max_size=7))
def test_a_turn_is_rendered_as_a_whole(
    source: str, turns: list[tuple[int, list[dict[str, Any]], dict[str, Any]]]
) -> None:
    """Turns that go on from any place of the one before."""
    seen, messages = BodyCache(), [{"role": "user", "content": LONG}]
    for kept, more, fields in turns:
        messages = [*messages[:kept], *more]
        for _ in range(2):  # the second time all of it is known
            assert text(source, prompt(seen, messages, **fields)) == text(source, prompt(None, messages, **fields))


def test_only_new_messages_are_rendered() -> None:
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    seen, messages = BodyCache(), [{"role": "user", "content": LONG}]
    template(source).render(prompt(seen, messages, tools=[TOOL]))
    messages.append({"role": "user", "content": "b"})
    second = prompt(seen, messages, tools=[TOOL])
    assert second.conversation is not None
    assert second.conversation.earlier is not None
    second.messages[0]["content"] = "changed, against all rules"
    assert template(source).render(second) == LONG + "b"
    assert second.conversation.earlier is None
