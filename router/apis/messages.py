"""Chat messages in the form in which vLLM passes them to a chat template, and the media in them.

- Parts are joined to one text or wrapped, as the template expects.
- Arguments of tool calls are objects.
- Keys are in vLLM's order, because templates print them as JSON.
- The role `developer` becomes `system` if the template does not support it.

Only an engine knows how many tokens an image has, and by which name it takes part in the hashes of its blocks
(router/tokens/media_reader.py). Where no engine can be asked, a prompt is matched exactly up to its first media item.
Beyond it, prompts are compared with each other only, and a text with the item's content hash replaces the item.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
import xxhash

# The beginning of the line that Claude Code writes before its system prompt (`router/apis/billing_line.py`).
BILLING_HEADER: Final = "x-anthropic-billing-header"
# The types of media parts, and their names in templates.
MODALITIES = {
    "image_url": "image",
    "input_image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio_embeds": "audio",
    "video_url": "video",
    "video_embeds": "video",
}


def media_type(part: dict[str, Any]) -> str | None:
    """Return the media type of a part, from its `type` or its key; None if it is no media."""
    kind = part.get("type")
    if not kind and not MODALITIES.keys().isdisjoint(part):
        kind = next(key for key in MODALITIES if key in part)
    return kind if isinstance(kind, str) and kind in MODALITIES else None


def has_media(messages: list[dict[str, Any]]) -> bool:
    """Return whether a conversation has images, audio or video."""
    return bool(media_parts(messages))


def media_parts(messages: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Return the media parts of a conversation in order, each with its type."""
    return [
        (part, kind)
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
        if isinstance(part, dict) and (kind := media_type(part)) is not None
    ]


def media_options(processor: Any, reading: Any) -> dict[str, Any] | None:
    """Return the body's fields that change how media are processed, by vLLM's names; None without one."""
    given = {"mm_processor_kwargs": processor, "media_io_kwargs": reading}
    return {name: value for name, value in given.items() if value is not None} or None


def is_fetched(part: dict[str, Any], kind: str) -> bool:
    """Return whether a media part is a link, whose content can change."""
    content = media_content(part, kind)
    return isinstance(content, str) and content.startswith(("http:", "https:"))


def media_content(part: dict[str, Any], kind: str) -> Any:
    """Return the URL or data of a media part, without options such as the level of detail."""
    content = part.get("image_url" if kind == "input_image" else kind, part.get("uuid"))
    return content.get("url", content.get("data", content)) if isinstance(content, dict) else content


def stand_in(part: dict[str, Any], kind: str) -> str:
    """Return a text that replaces a media part: equal for equal URLs or data, and unlikely in a prompt."""
    content = media_content(part, kind)
    data = content.encode(errors="replace") if isinstance(content, str) else msgspec.json.encode(content)
    return f"\0{MODALITIES[kind]} {xxhash.xxh3_128_hexdigest(data)}\0"


def media_length(messages: list[dict[str, Any]]) -> int:
    """Return the number of characters in the URLs and data of a conversation's media."""
    contents = (media_content(part, kind) for part, kind in media_parts(messages))
    return sum(len(content) for content in contents if isinstance(content, str))


Message = dict[str, Any]


def prepare_messages(
    messages: list[Message], *, wraps_parts: bool, knows_developer: bool, media_as_text: bool = False
) -> list[Message]:
    """Return the messages for the template. The given messages are not changed.

    - `wraps_parts`: each content becomes a list of parts, such as `{"type": "text", "text": …}`. Otherwise it is one
      string with a line for each text part.
    - `knows_developer`: the template supports the role `developer`.
    - `media_as_text`: a text replaces each media item, where vLLM inserts its placeholder.
    """
    prepared = [_message(message, wraps_parts, media_as_text) for message in messages]
    if not knows_developer and any(message["role"] == "developer" for message in prepared):
        return _developers_as_one_system(prepared)
    return prepared


def prepare_tools(tools: list[Any]) -> list[Any]:
    """Return new tools for the template with the keys that vLLM passes on."""
    return [_tool(tool) for tool in tools]


def is_rewritten(role: object, text: str) -> bool:
    """Return whether vLLM passes another text or role to templates than that of a message of a role and a text."""
    return role == "developer" or text.startswith(BILLING_HEADER)


def _message(message: Message, wraps_parts: bool, media_as_text: bool) -> Message:
    role, content = message["role"], message.get("content")
    # Shortcut for messages of a role and a text, which are the most common.
    if len(message) == 2 and isinstance(content, str) and not is_rewritten(role, content):
        if wraps_parts and role != "tool":
            return {"role": role, "content": [{"type": "text", "text": content}]}
        return message if next(iter(message)) == "role" else {"role": role, "content": content}
    parts = [content] if isinstance(content, str) else content or []
    if role == "system":
        parts = without_billing_line(parts)
    # A template that wraps parts keeps media in their place. For others vLLM puts placeholders first.
    if media_as_text:
        parts = [_media_as_text(part) for part in parts]
        if not wraps_parts:
            parts = sorted(parts, key=lambda part: not _stands_in(part))
    wrapped = [part for part in map(_wrapped_part, parts) if part is not None]
    result: Message = {"role": role, "content": wrapped if wraps_parts else _joined(wrapped)}
    if role == "assistant":
        calls = message.get("tool_calls")
        if calls and isinstance(calls, list):
            result["tool_calls"] = [_tool_call(call) for call in calls]
        reasoning = message.get("reasoning")
        if reasoning is None:
            reasoning = message.get("reasoning_content")
        if reasoning is not None:
            result["reasoning"] = result["reasoning_content"] = reasoning
    elif role == "tool":
        if "tool_call_id" in message:
            result["tool_call_id"] = message["tool_call_id"]
        if all(part["type"] == "text" for part in wrapped):
            result["content"] = _joined(wrapped)
    for key in ("name", "task"):
        if isinstance(message.get(key), str):
            result[key] = message[key]
    if role == "developer":
        tools = message.get("tools")
        result["tools"] = [_developer_tool(tool) for tool in tools] if isinstance(tools, list) else None
    return result


def without_billing_line(parts: Iterable[Any]) -> Iterator[Any]:
    """Yield the parts without the billing line of Claude Code's prompts, which always differs. vLLM drops it too."""
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
            yield part
        elif rest := text.partition("\n")[2]:
            yield {**part, "text": rest} if isinstance(part, dict) else rest


# The types of text parts, and the key that holds the text.
_TEXT_OF = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
# Keys of a part that vLLM reads itself. Templates receive the others, such as cache_control.
_OWN_KEYS = {"type", "text", "refusal", "thinking", "closed", "file", "data", "uuid", "name"} | (
    MODALITIES.keys() - {"input_image"}
)


def _wrapped_part(part: str | dict[str, Any]) -> dict[str, Any] | None:
    """Return a part in the wrapped form; None for a part that vLLM refuses or skips."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") or media_type(part)
    if not isinstance(kind, str):
        return None
    if kind == "tool_reference":
        return {"type": "tool_reference", "name": part.get("name")}
    others = {key: value for key, value in part.items() if key not in _OWN_KEYS}
    if kind in _TEXT_OF:
        text = part.get(_TEXT_OF[kind])
        return {"type": "text", "text": text, **others} if isinstance(text, str) else None
    return {"type": MODALITIES[kind], **others} if kind in MODALITIES else None


def _media_as_text(part: Any) -> Any:
    kind = media_type(part) if isinstance(part, dict) else None
    return stand_in(part, kind) if kind else part


def _stands_in(part: Any) -> bool:
    return isinstance(part, str) and part.startswith("\0")


def _joined(wrapped: list[dict[str, Any]]) -> str:
    texts = (part.get("text", part.get("name")) for part in wrapped)
    return "\n".join(text for text in texts if isinstance(text, str))


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        return call
    function = call["function"] | {"arguments": _arguments(call["function"].get("arguments"))}
    return _ordered(call | {"function": _ordered(function, ("arguments", "name"))}, ("id", "function", "type"))


def _arguments(arguments: Any) -> dict[str, Any]:
    """Return a tool call's arguments as an object; empty if they are not an object."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return {}
    return arguments if isinstance(arguments, dict) else {}


def _tool(tool: Any) -> Any:
    """Return a tool with vLLM's keys in vLLM's order; missing keys are null, except `strict` and `defer_loading`."""
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return tool
    deferred = tool.get("defer_loading")
    function = {key: tool["function"].get(key) for key in ("name", "description", "parameters")}
    optional = {"strict": tool["function"].get("strict"), "defer_loading": tool["function"].get("defer_loading")}
    if optional["defer_loading"] is None:
        optional["defer_loading"] = deferred
    function |= {key: value for key, value in optional.items() if value is not None}
    result = {"type": tool.get("type", "function"), "function": function}
    return result if deferred is None else result | {"defer_loading": deferred}


def _developer_tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return tool
    function = _ordered(tool["function"], ("name", "description", "parameters", "strict"))
    return _ordered(tool | {"function": function}, ("function", "type"))


def _ordered(mapping: dict[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    return {key: mapping[key] for key in first if key in mapping} | mapping


def _developers_as_one_system(conversation: list[Message]) -> list[Message]:
    """Turn developer messages into system messages, and join all system messages into one at the start."""
    roles = ["system" if message["role"] == "developer" else message["role"] for message in conversation]
    if roles.index("system") == 0 and roles.count("system") == 1:
        first = {key: value for key, value in conversation[0].items() if key != "tools"}
        return [first | {"role": "system"}, *conversation[1:]]
    contents = [
        _joined(content) if isinstance(content := message["content"], list) else content
        for message, role in zip(conversation, roles, strict=True)
        if role == "system"
    ]
    system = {"role": "system", "content": "\n\n".join(content for content in contents if content)}
    return [system, *(message for message, role in zip(conversation, roles, strict=True) if role != "system")]
