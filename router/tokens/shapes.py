"""What a prompt has in it that engines and the router may read differently, and a probing request for each.

A shape is a name for one such thing: a system message, tools, reasoning in the history. A prompt may have several. A
probe is a short request that shows one of them, as few others as can be, and no text that changes with the day.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import msgspec

from router.apis.endpoints import ANTHROPIC, CHAT, COMPLETIONS, RESPONSES, Call, read_call
from router.apis.media import has_media
from router.apis.requests import ChatPrompt, TextPrompts


class Shape(StrEnum):
    """The shapes. Every chat is `PLAIN`, every text `TEXT`."""

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


_OF_PATH = {RESPONSES: Shape.RESPONSES, ANTHROPIC: Shape.MESSAGES}


def shapes_of(prompt: ChatPrompt | TextPrompts) -> set[Shape]:
    """The shapes of a prompt."""
    if isinstance(prompt, TextPrompts):
        return {Shape.TEXT}
    found = {Shape.PLAIN}
    if prompt.call is not None and prompt.call[0] in _OF_PATH:
        found.add(_OF_PATH[prompt.call[0]])
    given = {
        Shape.TOOLS: prompt.tools,
        Shape.TEMPLATE_KWARGS: prompt.chat_template_kwargs or prompt.documents,
        Shape.EFFORT: prompt.reasoning_effort or prompt.thinking_off,
        Shape.CONTINUED: prompt.continue_final_message,
        Shape.NO_GENERATION_PROMPT: not prompt.add_generation_prompt and not prompt.continue_final_message,
        Shape.SPECIAL_TOKENS: prompt.add_special_tokens and Shape.RESPONSES not in found,
        Shape.TRUNCATED: prompt.truncation,
        Shape.MEDIA: has_media(prompt.messages),
    }
    found |= {shape for shape, present in given.items() if present}
    for message in prompt.messages:
        found |= _shapes_of_message(message)
    return found


def _shapes_of_message(message: dict[str, Any]) -> set[Shape]:
    found: set[Shape] = set()
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if role == "system":
        found.add(Shape.SYSTEM)
    elif role == "developer":
        found.add(Shape.DEVELOPER)
    elif role == "tool":
        found.add(Shape.TOOL_RESULTS)
    elif role == "assistant":
        found.add(Shape.TURNS)
    if calls:
        found.add(Shape.TOOL_RESULTS)
        if isinstance(calls, list) and len(calls) > 1:
            found.add(Shape.PARALLEL_CALLS)
    elif content is None:
        found.add(Shape.NULL)
    elif content in ("", []):
        found.add(Shape.EMPTY)
    if isinstance(content, list):
        found.add(Shape.PARTS)
    if message.get("reasoning") or message.get("reasoning_content"):
        found.add(Shape.REASONING)
    if message.get("name") is not None and role != "tool":
        found.add(Shape.NAMES)
    return found


@dataclass(frozen=True)
class Probe:
    """A request that shows a shape. `prompt` is as the router reads it."""

    shape: Shape
    path: str
    body: dict[str, Any]

    def prompt(self) -> ChatPrompt | TextPrompts:
        """What the router reads of it."""
        call = Call("POST", self.path, [], msgspec.json.encode({"model": "probe"} | self.body))
        prompt = read_call(call).prompt
        assert isinstance(prompt, (ChatPrompt, TextPrompts))
        return prompt

    @property
    def unused_tools(self) -> Probe | None:
        """The same request with tools that are shown, but not to be called; None for one without."""
        return replace(self, body=self.body | {"tool_choice": "none"}) if "tools" in self.body else None


_USER = {"role": "user", "content": "Which worker holds the prefix of this prompt?"}
_SYSTEM = {"role": "system", "content": "Be brief.\nName one worker."}
_ANSWER = {"role": "assistant", "content": "The second one, since yesterday."}
_AGAIN = {"role": "user", "content": "  And which one is next?\n"}
_FUNCTION = {
    "name": "holder_of",
    "description": "Finds who holds a prefix.",
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


def _chat(shape: Shape, *messages: dict[str, Any], **others: Any) -> Probe:
    return Probe(shape, CHAT, {"messages": list(messages)} | others)


# Nine characters: Mistral's templates take no others.
_FIRST, _SECOND = "call00001", "call00002"

PROBES: tuple[Probe, ...] = (
    _chat(Shape.PLAIN, _USER),
    _chat(Shape.SYSTEM, _SYSTEM, _USER),
    _chat(Shape.TURNS, _USER, _ANSWER, _AGAIN),
    _chat(Shape.TOOLS, _USER, tools=_TOOLS),
    _chat(Shape.TOOL_RESULTS, _USER, _called(_FIRST), _result(_FIRST), tools=_TOOLS),
    _chat(
        Shape.PARALLEL_CALLS,
        _USER,
        _called(_FIRST, _SECOND),
        _result(_FIRST),
        _result(_SECOND),
        _ANSWER,
        _AGAIN,
        tools=_TOOLS,
    ),
    _chat(Shape.REASONING, _USER, _ANSWER | {"reasoning": "It held it before."}, _AGAIN),
    _chat(Shape.PARTS, {"role": "user", "content": [{"type": "text", "text": text} for text in ("Who?", " And why?")]}),
    _chat(Shape.TEMPLATE_KWARGS, _USER, chat_template_kwargs={"enable_thinking": False, "thinking": True}),
    _chat(Shape.EFFORT, _USER, reasoning_effort="low"),
    _chat(Shape.NAMES, _USER | {"name": "ann"}),
    _chat(Shape.EMPTY, _USER, _ANSWER | {"content": ""}, _AGAIN),
    _chat(Shape.NULL, _USER, _ANSWER | {"content": None}, _AGAIN),
    _chat(Shape.CONTINUED, _USER, _ANSWER, add_generation_prompt=False, continue_final_message=True),
    _chat(Shape.NO_GENERATION_PROMPT, _USER, add_generation_prompt=False),
    _chat(Shape.DEVELOPER, {"role": "developer", "content": "Be brief."}, _USER),
    _chat(Shape.SPECIAL_TOKENS, _USER, add_special_tokens=True),
    _chat(Shape.TRUNCATED, _USER, truncate_prompt_tokens=4),
    Probe(Shape.TEXT, COMPLETIONS, {"prompt": f"{_SYSTEM['content']} {_USER['content']}"}),
    Probe(
        Shape.RESPONSES,
        RESPONSES,
        {"instructions": _SYSTEM["content"], "input": [_USER, _ANSWER, _AGAIN]},
    ),
    Probe(
        Shape.MESSAGES,
        ANTHROPIC,
        {"max_tokens": 1, "system": _SYSTEM["content"], "messages": [_USER, _ANSWER, _AGAIN]},
    ),
)
