"""Kinds of prompts that engines and the router may tokenize differently, with a probe for each.

A probe kind is a name for one feature: a system message, tools, reasoning in earlier turns. A prompt can have several.
A probe is a short request with one of them, few others, and no text that changes with the date.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec

from router.apis.endpoints import ANTHROPIC, CHAT, COMPLETIONS, RESPONSES, Call, read_call
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
    NO_GENERATION_PROMPT = "no_generation_prompt"
    DEVELOPER = "developer"
    SPECIAL_TOKENS = "special_tokens"
    TRUNCATED = "truncated"
    MEDIA = "media"
    TEXT = "text"
    RESPONSES = "responses"
    MESSAGES = "messages"


_OF_PATH = {RESPONSES: ProbeKind.RESPONSES, ANTHROPIC: ProbeKind.MESSAGES}


def probe_kinds(prompt: ChatPrompt | TextPrompts) -> set[ProbeKind]:
    if isinstance(prompt, TextPrompts):
        return {ProbeKind.TEXT}
    found = {ProbeKind.PLAIN}
    if prompt.call is not None and prompt.call[0] in _OF_PATH:
        found.add(_OF_PATH[prompt.call[0]])
    given = {
        ProbeKind.TOOLS: prompt.tools,
        ProbeKind.TEMPLATE_KWARGS: prompt.chat_template_kwargs or prompt.documents,
        ProbeKind.EFFORT: prompt.reasoning_effort or prompt.thinking_off,
        ProbeKind.CONTINUED: prompt.continue_final_message,
        ProbeKind.NO_GENERATION_PROMPT: not prompt.add_generation_prompt and not prompt.continue_final_message,
        ProbeKind.SPECIAL_TOKENS: prompt.add_special_tokens and ProbeKind.RESPONSES not in found,
        ProbeKind.TRUNCATED: prompt.truncation,
        ProbeKind.MEDIA: has_media(prompt.messages),
    }
    found |= {kind for kind, present in given.items() if present}
    for message in prompt.messages:
        found |= _kinds_of_message(message)
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
        call = Call("POST", self.path, [], msgspec.json.encode({"model": "probe"} | self.body))
        prompt = read_call(call).prompt
        assert isinstance(prompt, (ChatPrompt, TextPrompts))
        return prompt

    @property
    def unused_tools(self) -> Probe | None:
        """A copy of the request with tools that are shown but may not be called; None if it has no tools."""
        return replace(self, body=self.body | {"tool_choice": "none"}) if "tools" in self.body else None


_USER = {"role": "user", "content": "Which worker holds the prefix of this prompt?"}
_SYSTEM = {"role": "system", "content": "Be brief.\nName one worker."}
_ANSWER = {"role": "assistant", "content": "The second one, since yesterday."}
_AGAIN = {"role": "user", "content": "  And which one is next?\n"}
_FUNCTION = {
    "name": "holder_of",
    "description": "Finds the worker with a prefix.",
    "parameters": {
        "type": "object",
        "properties": {"prefix": {"type": "string"}, "tier": {"type": "string", "enum": ["gpu", "cpu"]}},
        "required": ["prefix"],
    },
}
_TOOLS = [{"type": "function", "function": _FUNCTION}]


def _called(*ids: str, **others: Any) -> dict[str, Any]:
    arguments = '{"prefix": "abc", "tier": "gpu"}'
    calls = [{"id": id_, "type": "function", "function": {"name": "holder_of", "arguments": arguments}} for id_ in ids]
    return {"role": "assistant", "content": None, "tool_calls": calls} | others


def _result(id_: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": '{"worker": 2}'}


def _chat(kind: ProbeKind, *messages: dict[str, Any], **others: Any) -> Probe:
    return Probe(kind, CHAT, {"messages": list(messages)} | others)


# Mistral's templates require nine characters.
_FIRST, _SECOND = "call00001", "call00002"

PROBES: tuple[Probe, ...] = (
    _chat(ProbeKind.PLAIN, _USER),
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
    _chat(
        ProbeKind.PARTS, {"role": "user", "content": [{"type": "text", "text": text} for text in ("Who?", " And why?")]}
    ),
    _chat(ProbeKind.TEMPLATE_KWARGS, _USER, chat_template_kwargs={"enable_thinking": False, "thinking": True}),
    _chat(ProbeKind.EFFORT, _USER, reasoning_effort="low"),
    _chat(ProbeKind.NAMES, _USER | {"name": "ann"}),
    _chat(ProbeKind.EMPTY, _USER, _ANSWER | {"content": ""}, _AGAIN),
    _chat(ProbeKind.NULL, _USER, _ANSWER | {"content": None}, _AGAIN),
    _chat(ProbeKind.CONTINUED, _USER, _ANSWER, add_generation_prompt=False, continue_final_message=True),
    _chat(ProbeKind.NO_GENERATION_PROMPT, _USER, add_generation_prompt=False),
    _chat(ProbeKind.DEVELOPER, {"role": "developer", "content": "Be brief."}, _USER),
    _chat(ProbeKind.SPECIAL_TOKENS, _USER, add_special_tokens=True),
    _chat(ProbeKind.TRUNCATED, _USER, truncate_prompt_tokens=4),
    Probe(ProbeKind.TEXT, COMPLETIONS, {"prompt": f"{_SYSTEM['content']} {_USER['content']}"}),
    Probe(
        ProbeKind.RESPONSES,
        RESPONSES,
        {"instructions": _SYSTEM["content"], "input": [_USER, _ANSWER, _AGAIN]},
    ),
    Probe(
        ProbeKind.MESSAGES,
        ANTHROPIC,
        {"max_tokens": 1, "system": _SYSTEM["content"], "messages": [_USER, _ANSWER, _AGAIN]},
    ),
)
