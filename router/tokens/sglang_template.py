"""Chat templates as SGLang 0.5.23 renders them: what it passes to a template differs from vLLM in many places.

- Messages and tools have the fields that SGLang's API knows, in its order. Others are dropped.
- Texts in parts are joined by a space, unless the template seems to read parts or media.
- An answer at the end becomes a message of the user. If it is to be continued, its tokens are appended.
- `tool_choice` selects the tools that the template receives.
- Thinking is on or off in two template variables if the request names an effort.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvevents.decoding import json_reader, read_json
from router.apis.anthropic_messages import system_text
from router.apis.endpoints import ANTHROPIC, CHAT, RESPONSES
from router.apis.messages import MODALITIES, media_type, stand_in
from router.apis.requests import ChatPrompt
from router.tokens.chat_template import ChatTemplate
from router.tokens.content_format import is_read, parsed

Message = dict[str, Any]

# The fields of messages of every role but `user`, in SGLang's order, around `tool_calls` and `tools`.
_BEFORE_CALLS: Final = ("tool_call_id", "name", "phase", "reasoning_content")
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max")
_TEXTS: Final = ("text", "input_text")
# A template with one of these words receives parts, whatever it does with them.
_MEDIA_WORDS: Final = ("image", "audio", "video", "vision")
_LOOPED: Final = ("message", "msg", "m")
_DEVELOPER: Final = "Developer instructions:"


class _System(msgspec.Struct):
    system: Any = None


_decode_system = json_reader(_System)


class SglangTemplate(ChatTemplate):
    """A compiled chat template that receives what SGLang passes to it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """Compile a template with the special tokens by their names in it. Raises TemplateSyntaxError."""
        super().__init__(source, special_tokens)
        self._wraps_parts = _receives_parts(source)
        self._shows_systems = _shows_later_systems(source)

    def answer_to_continue(self, chat: ChatPrompt) -> str:
        """Return the text whose tokens follow those of the rendered chat, or an empty text."""
        return self._split(chat, False)[1] if chat.continue_final_message else ""

    def _text(self, chat: ChatPrompt, media_as_text: bool) -> str:
        tools, given = _tools(chat), self._variables_of(chat)
        fixed = {"documents": given.get("documents"), "add_generation_prompt": True, "continue_final_message": False}
        messages = self._split(chat, media_as_text)[0]
        try:
            return self._rendered(messages, given | fixed | {"tools": tools})
        except Exception:  # templates refuse by any kind of error; some expect tools without their type
            if not tools:
                raise
            return self._rendered(messages, given | fixed | {"tools": [tool["function"] for tool in tools]})

    def _variables_of(self, chat: ChatPrompt) -> dict[str, Any]:
        variables = dict(chat.chat_template_kwargs or {})
        effort, thinking = _effort(chat)
        if thinking is not None:
            variables.setdefault("thinking", thinking)
            variables.setdefault("enable_thinking", thinking)
        if chat.thinking_off:  # it sets the variable of its reasoning parser
            variables |= {"thinking": False, "enable_thinking": False}
        if (named := variables.pop("reasoning_effort", None)) is not None:
            effort = named
        return variables if effort is None else {"reasoning_effort": effort, **variables}

    def _split(self, chat: ChatPrompt, media_as_text: bool) -> tuple[list[Message], str]:
        """Return the messages to render, and the answer that is to be continued."""
        path = chat.call[0] if chat.call is not None else CHAT
        given = chat.messages if path == CHAT else _of_other_api(chat.messages, path)
        if path == ANTHROPIC and chat.call is not None:
            given = _with_own_system(given, chat.call[1])
        messages = [self._message(message, media_as_text) for message in given]
        if path != CHAT and not self._shows_systems:
            messages = _with_one_system(messages, "\n\n" if path == RESPONSES else "\n")
        last = messages[-1]
        if last["role"] != "assistant" or not isinstance(last["content"], str):
            return messages, ""
        if chat.continue_final_message:
            return messages[:-1], last["content"]
        return [*messages[:-1], {"role": "user", "content": last["content"]}], ""

    def _message(self, message: Message, media_as_text: bool) -> Message:
        role, content = message["role"], message.get("content")
        if role != "user":
            role = role.lower()
        result: Message = {"role": role}
        if not isinstance(content, list):
            result["content"] = "" if content is None else content
            if len(message) == 2:  # the common case
                return result
        if role != "user":
            result |= {name: message[name] for name in _BEFORE_CALLS if message.get(name) is not None}
            calls, tools = message.get("tool_calls"), message.get("tools")
            if isinstance(calls, list):
                result["tool_calls"] = [_call(call, role) for call in calls]
            if isinstance(tools, list):
                result["tools"] = [_tool(tool) for tool in tools]
            if message.get("prefix") is not None:
                result["prefix"] = message["prefix"]
        if isinstance(content, list):
            result["content"] = self._content(content, role, media_as_text)
        return result

    def _content(self, parts: list[Any], role: str, media_as_text: bool) -> str | list[dict[str, Any]]:
        """Return a list of parts in the form that the template receives."""
        kept = [known for part in parts if (known := _part(part, media_as_text)) is not None]
        texts = [part["text"] for part in kept if part["type"] == "text"]
        if not self._wraps_parts or (role == "tool" and all(_is_text(part) for part in parts)):
            return " ".join(texts)
        return kept


def _part(part: Any, media_as_text: bool) -> dict[str, Any] | None:
    """Return a part as templates receive it; None if SGLang drops it."""
    if not isinstance(part, dict):
        return {"type": "text", "text": part} if isinstance(part, str) else None
    kind = part.get("type")
    if kind in _TEXTS or kind == "output_text":  # the conversion of other APIs keeps these names
        return {"type": "text", "text": str(part.get("text"))}
    if kind == "tool_reference":
        return part
    media = media_type(part)
    if media is None:
        return None
    return {"type": "text", "text": stand_in(part, media)} if media_as_text else {"type": MODALITIES[media]}


def _is_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, dict) and part.get("type") == "text")


def _call(call: Any, role: str) -> dict[str, Any]:
    """Return a tool call. Raises ValueError if its arguments are no JSON object."""
    function = call["function"]
    arguments = function.get("arguments")
    if role == "assistant" and isinstance(arguments, str):
        arguments = read_json(arguments.encode(), Any)
        if not isinstance(arguments, dict):
            raise ValueError("Assistant tool call function.arguments must be a JSON object.")
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _tools(chat: ChatPrompt) -> list[dict[str, Any]] | None:
    """Return the tools that the template receives: all, the chosen one, or None."""
    choice, tools = chat.tool_choice, chat.tools
    if not tools or choice == "none":
        return None
    if isinstance(choice, dict):
        name = choice["function"].get("name")
        tools = [tool for tool in tools if tool["function"]["name"] == name]
    return [_tool(tool) for tool in tools] or None


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool with the known fields of its function in the client's order, the missing ones after them."""
    given, deferred = tool["function"], tool.get("defer_loading")
    known = {name: given.get(name) for name in ("description", "name", "parameters")}
    others = {"strict": given.get("strict"), "defer_loading": given.get("defer_loading", deferred)}
    known |= {name: value for name, value in others.items() if value is not None}
    function = {name: known[name] for name in given if name in known} | known
    return {"type": tool.get("type", "function"), "function": function, "defer_loading": deferred}


def _effort(chat: ChatPrompt) -> tuple[str | float | None, bool | None]:
    """Return the effort of a request, and whether its fields turn thinking on or off; None if they do neither."""
    effort: str | float | None = chat.reasoning_effort
    thinking = None
    if chat.reasoning is not None:
        found = chat.reasoning.get("effort")
        if found is None:
            found = chat.reasoning.get("reasoning_effort")
        if found is not None:
            effort = found if found in _EFFORTS else float(found)
        enabled = chat.reasoning.get("enabled")
        if enabled is None:
            enabled = chat.reasoning.get("enable")
        if isinstance(enabled, str):
            enabled = enabled.strip().lower() in ("1", "true", "yes", "y", "on")
        thinking = True if enabled else None
    return effort, thinking if effort is None else effort != "none"


def _of_other_api(messages: list[Message], path: str) -> list[Message]:
    """Return the chat of another API: reasoning has SGLang's name, and developers are labelled systems."""
    found = []
    for message in messages:
        if message.get("reasoning") is not None:
            message = {**message, "reasoning_content": message["reasoning"]}
        if path == RESPONSES and message["role"] == "developer":
            message = {**message, "role": "system", "content": _labelled(message.get("content"))}
        found.append(message)
    return found


def _with_own_system(messages: list[Message], body: bytes) -> list[Message]:
    """Return the messages with the system prompt of a body in the form of SGLang: a line for each block."""
    system = _decode_system(body).system
    if not isinstance(system, list):
        return messages
    texts = [block.get("text") for block in system if isinstance(block, dict) and block.get("type") == "text"]
    text = "\n".join(text for text in texts if isinstance(text, str) and text)
    if system_text(system):  # the conversion has a message for it
        messages = messages[1:]
    return [{"role": "system", "content": text}, *messages] if text else messages


def _labelled(content: Any) -> Any:
    if isinstance(content, str):
        return f"{_DEVELOPER}\n{content}"
    if not isinstance(content, list):
        return content
    for place, part in enumerate(content):
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return [*content[:place], {**part, "text": f"{_DEVELOPER}\n{part['text']}"}, *content[place + 1 :]]
    return [{"type": "text", "text": _DEVELOPER}, *content]


def _with_one_system(messages: list[Message], between: str) -> list[Message]:
    texts = [
        text
        for message in messages
        if message["role"] == "system"
        for text in (
            [message["content"]]
            if isinstance(message["content"], str)
            else [part["text"] for part in message["content"] if part["type"] == "text"]
        )
    ]
    others = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": between.join(texts)}, *others] if texts else others


def _receives_parts(source: str) -> bool:
    """Return whether SGLang keeps the parts of a content for this template, by its rules."""
    if any(word in source for word in _MEDIA_WORDS):
        return True
    loops = parsed(source).find_all(nodes.For)
    return any(is_read(loop.iter, name, "content") for loop in loops for name in _LOOPED)


def _shows_later_systems(source: str) -> bool:
    """Return whether a template shows a system message between others, by SGLang's plain rendering."""
    mark = "KVROUTER_LATER_SYSTEM"
    texts = (("system", "t"), ("user", "t"), ("system", mark), ("user", "t"))
    conversation = [{"role": role, "content": text} for role, text in texts]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    try:
        return mark in environment.from_string(source).render(messages=conversation, add_generation_prompt=False)
    except Exception:  # templates refuse by any kind of error
        return False
