"""Kinds of prompts that engines and the router may tokenize differently, with a probe for each.

A probe kind is a name for one feature: a system message, tools, reasoning in earlier turns. A prompt can have several.
A probe is a short request with one of them, few others, and no text that changes with the date. The text of the probe
that every chat depends on has what tokenizers may split differently.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec

from router.apis.endpoints import ANTHROPIC, CHAT, COMPLETIONS, RESPONSES, read_request
from router.apis.messages import has_media
from router.apis.requests import ChatPrompt, TextPrompts


class ProbeKind(StrEnum):
    """The probe kinds. Every chat is `PLAIN`, every text `TEXT`."""

    PLAIN = "plain"
    SYSTEM = "system"
    TURNS = "turns"
    TOOLS = "tools"
    TOOL_RESULTS = "tool_results"
    PARALLEL_CALLS = "parallel_calls"
    REASONING = "reasoning"
    PARTS = "parts"
    TEMPLATE_KWARGS = "template_kwargs"
    EFFORT = "effort"
    NAMES = "names"
    EMPTY = "empty"
    NULL = "null"
    CONTINUED = "continued"
    ENDS_WITH_ANSWER = "ends_with_answer"
    NO_GENERATION_PROMPT = "no_generation_prompt"
    DEVELOPER = "developer"
    SPECIAL_TOKENS = "special_tokens"
    TRUNCATED = "truncated"
    MEDIA = "media"
    TEXT = "text"
    RESPONSES = "responses"
    RESPONSES_TOOLS = "responses_tools"
    MESSAGES = "messages"
    MESSAGES_TOOLS = "messages_tools"


# For each other API: the kind of all its prompts, and that of prompts with tools, reasoning or content in parts.
_OF_PATH = {
    RESPONSES: (ProbeKind.RESPONSES, ProbeKind.RESPONSES_TOOLS),
    ANTHROPIC: (ProbeKind.MESSAGES, ProbeKind.MESSAGES_TOOLS),
}
_WITH_TOOLS = frozenset({ProbeKind.TOOLS, ProbeKind.TOOL_RESULTS, ProbeKind.REASONING, ProbeKind.PARTS})


def probe_kinds(prompt: ChatPrompt | TextPrompts) -> set[ProbeKind]:
    if isinstance(prompt, TextPrompts):
        return {ProbeKind.TEXT}
    found = {ProbeKind.PLAIN}
    of_path = _OF_PATH.get(prompt.call[0]) if prompt.call is not None else None
    if of_path is not None:
        found.add(of_path[0])
    given = {
        ProbeKind.TOOLS: prompt.tools,
        ProbeKind.TEMPLATE_KWARGS: prompt.chat_template_kwargs or prompt.documents,
        ProbeKind.EFFORT: prompt.reasoning_effort or prompt.reasoning or prompt.thinking_off,
        ProbeKind.CONTINUED: prompt.continue_final_message,
        ProbeKind.ENDS_WITH_ANSWER: not prompt.continue_final_message and prompt.messages[-1]["role"] == "assistant",
        ProbeKind.NO_GENERATION_PROMPT: not prompt.add_generation_prompt and not prompt.continue_final_message,
        ProbeKind.SPECIAL_TOKENS: prompt.add_special_tokens and ProbeKind.RESPONSES not in found,
        ProbeKind.TRUNCATED: prompt.truncation,
        ProbeKind.MEDIA: has_media(prompt.messages),
    }
    found |= {kind for kind, present in given.items() if present}
    for message in prompt.messages:
        found |= _kinds_of_message(message)
    if of_path is not None and not found.isdisjoint(_WITH_TOOLS):
        found.add(of_path[1])
    return found


def _kinds_of_message(message: dict[str, Any]) -> set[ProbeKind]:
    found: set[ProbeKind] = set()
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role == "system":
        found.add(ProbeKind.SYSTEM)
    elif role == "developer":
        found.add(ProbeKind.DEVELOPER)
    elif role == "tool":
        found.add(ProbeKind.TOOL_RESULTS)
    elif role == "assistant":
        found.add(ProbeKind.TURNS)
    if calls:
        found.add(ProbeKind.TOOL_RESULTS)
        if isinstance(calls, list) and len(calls) > 1:
            found.add(ProbeKind.PARALLEL_CALLS)
    elif content is None:
        found.add(ProbeKind.NULL)
    elif content in ("", []):
        found.add(ProbeKind.EMPTY)
    if isinstance(content, list):
        found.add(ProbeKind.PARTS)
    if message.get("reasoning") or message.get("reasoning_content"):
        found.add(ProbeKind.REASONING)
    if message.get("name") is not None and role != "tool":
        found.add(ProbeKind.NAMES)
    return found


@dataclass(frozen=True)
class Probe:
    """A request of a probe kind."""

    kind: ProbeKind
    path: str
    body: dict[str, Any]

    def prompt(self) -> ChatPrompt | TextPrompts:
        """Return the parsed prompt."""
        body = msgspec.json.encode({"model": "probe"} | self.body)
        prompt = read_request("POST", self.path, [], body).prompt
        assert isinstance(prompt, (ChatPrompt, TextPrompts))
        return prompt

    @property
    def unused_tools(self) -> Probe | None:
        """A copy of the request with tools that are shown but may not be called; None if it has no tools."""
        choice = {"type": "none"} if self.path == ANTHROPIC else "none"
        return replace(self, body=self.body | {"tool_choice": choice}) if "tools" in self.body else None


_USER = {"role": "user", "content": "Which worker holds the prefix of this prompt?"}
# What tokenizers split and normalize differently: numbers, capitals, spaces, line ends, marks, scripts and emoji.
_VARIED = (
    "It's 1234567 of 0x0010 tokens, 10,000.50 WE'LL say; isn\u2019t it?\n\n\tif (x>=10):"
    "  # \u00bd caf\u00e9 cafe\u0301\r\n    return  [{'a':\u00a01e-05}]...   \u6f22\u5b57\u304b\u306a"
    " \ud55c\uad6d\uc5b4 \u0627\u0644\u0639\u0631\u0628"
    " \u0939\u093f\u0928\u094d\u0926\u0940 \ufb01\u00b2 \U0001f469\u200d\U0001f4bb\U0001f642 \u2014"
    " http://a.b/c?d=1&e=%20_f__g end"
)
_SYSTEM = {"role": "system", "content": "Be brief.\nName one worker."}
_ANSWER = {"role": "assistant", "content": "The second one, since yesterday."}
_AGAIN = {"role": "user", "content": "  And which one is next?\n"}
_FUNCTION: dict[str, Any] = {
    "name": "holder_of",
    "description": "Finds the worker with a prefix.",
    "parameters": {
        "type": "object",
        "properties": {"prefix": {"type": "string"}, "tier": {"type": "string", "enum": ["gpu", "cpu"]}},
        "required": ["prefix"],
    },
}
_TOOLS = [{"type": "function", "function": _FUNCTION}]


_ARGUMENTS = '{"prefix": "abc", "tier": "gpu"}'
_RESULT = '{"worker": 2}'


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _called(*ids: str, **others: Any) -> dict[str, Any]:
    function = {"name": _FUNCTION["name"], "arguments": _ARGUMENTS}
    calls = [{"id": id_, "type": "function", "function": function} for id_ in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls} | others


def _result(id_: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": _RESULT}


def _chat(kind: ProbeKind, *messages: dict[str, Any], **others: Any) -> Probe:
    return Probe(kind, CHAT, {"messages": list(messages)} | others)


# Mistral's templates require nine characters.
_FIRST, _SECOND = "call00001", "call00002"

PROBES: tuple[Probe, ...] = (
    _chat(ProbeKind.PLAIN, _USER | {"content": f"{_USER['content']} {_VARIED}"}),
    _chat(ProbeKind.SYSTEM, _SYSTEM, _USER),
    _chat(ProbeKind.TURNS, _USER, _ANSWER, _AGAIN),
    _chat(ProbeKind.TOOLS, _USER, tools=_TOOLS),
    _chat(ProbeKind.TOOL_RESULTS, _USER, _called(_FIRST), _result(_FIRST), tools=_TOOLS),
    _chat(
        ProbeKind.PARALLEL_CALLS,
        _USER,
        _called(_FIRST, _SECOND),
        _result(_FIRST),
        _result(_SECOND),
        _ANSWER,
        _AGAIN,
        tools=_TOOLS,
    ),
    _chat(ProbeKind.REASONING, _USER, _ANSWER | {"reasoning": "It held it before."}, _AGAIN),
    _chat(ProbeKind.PARTS, {"role": "user", "content": [_text("Who?"), _text(" And why?")]}),
    _chat(ProbeKind.TEMPLATE_KWARGS, _USER, chat_template_kwargs={"enable_thinking": False, "thinking": True}),
    _chat(ProbeKind.EFFORT, _USER, reasoning_effort="low"),
    _chat(ProbeKind.NAMES, _USER | {"name": "ann"}),
    _chat(ProbeKind.EMPTY, _USER, _ANSWER | {"content": ""}, _AGAIN),
    _chat(ProbeKind.NULL, _USER, _ANSWER | {"content": None}, _AGAIN),
    _chat(ProbeKind.CONTINUED, _USER, _ANSWER, add_generation_prompt=False, continue_final_message=True),
    _chat(ProbeKind.ENDS_WITH_ANSWER, _USER, _ANSWER),
    _chat(ProbeKind.NO_GENERATION_PROMPT, _USER, add_generation_prompt=False),
    _chat(ProbeKind.DEVELOPER, {"role": "developer", "content": "Be brief."}, _USER),
    _chat(ProbeKind.SPECIAL_TOKENS, _USER, add_special_tokens=True),
    _chat(ProbeKind.TRUNCATED, _USER, truncate_prompt_tokens=4),
    Probe(ProbeKind.TEXT, COMPLETIONS, {"prompt": f"{_SYSTEM['content']} {_VARIED}"}),
    Probe(
        ProbeKind.RESPONSES,
        RESPONSES,
        {"instructions": _SYSTEM["content"], "input": [_USER, _ANSWER, _AGAIN]},
    ),
    Probe(
        ProbeKind.RESPONSES_TOOLS,
        RESPONSES,
        {
            "tools": [_FUNCTION | {"type": "function", "strict": False}],
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": _USER["content"]}]},
                {"type": "function_call", "call_id": _FIRST, "name": _FUNCTION["name"], "arguments": _ARGUMENTS},
                {"type": "function_call_output", "call_id": _FIRST, "output": _RESULT},
                _ANSWER,
                _AGAIN,
            ],
        },
    ),
    Probe(
        ProbeKind.MESSAGES,
        ANTHROPIC,
        {"max_tokens": 1, "system": _SYSTEM["content"], "messages": [_USER, _ANSWER, _AGAIN]},
    ),
    Probe(
        ProbeKind.MESSAGES_TOOLS,
        ANTHROPIC,
        {
            "max_tokens": 1,
            "system": [_text(_SYSTEM["content"])],
            "tools": [{name if name != "parameters" else "input_schema": value for name, value in _FUNCTION.items()}],
            "messages": [
                {"role": "user", "content": [_text("Who?"), _text(" And why?")]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "It held it before.", "signature": ""},
                        _text(_ANSWER["content"]),
                        {"type": "tool_use", "id": _FIRST, "name": _FUNCTION["name"], "input": {"prefix": "abc"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": _FIRST, "content": [_text(_RESULT)]}],
                },
            ],
        },
    ),
)
