"""Requests to `/v1/messages`: the chat that vLLM makes of an Anthropic request, and that API's errors."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from http_api.errors import RequestError
from router.apis.agent_hints import hints_in_body
from router.apis.body_fields import MessagesFields
from router.apis.fields import kind_of, model_name, optional_string, read_body
from router.apis.identities import find_identity
from router.apis.messages import BILLING_HEADER
from router.apis.requests import ChatPrompt, RoutedRequest
from router.http.headers import HeaderItems

Message = dict[str, Any]
Block = dict[str, Any]

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def decode_messages(body: bytes, headers: HeaderItems = ()) -> RoutedRequest:
    """Parse what routing needs of the body. Raises RequestError (400) that names the invalid field."""
    fields = read_body(body, MessagesFields)
    model = model_name(fields.model)
    _check_messages(fields.messages)
    thinking = fields.thinking.get("type") if isinstance(fields.thinking, dict) else None
    effort = fields.output_config.get("effort") if isinstance(fields.output_config, dict) else None
    chat = _system(fields.system)
    for message in fields.messages:
        chat += _converted(message)
    prompt = ChatPrompt(
        messages=chat,
        tools=_tools(fields.tools, fields.messages),
        reasoning_effort=effort if isinstance(effort, str) else None,
        chat_template_kwargs=fields.chat_template_kwargs if isinstance(fields.chat_template_kwargs, dict) else None,
        merges_system=True,
        thinking_off=thinking == "disabled",
    )
    return RoutedRequest(
        name=model,
        prompt=prompt if chat else None,
        streamed=fields.stream or False,
        cache_salt=optional_string(fields.cache_salt, "cache_salt"),
        max_tokens=fields.max_tokens,
        identity=find_identity(headers, fields),
        hints=hints_in_body(fields.nvext),
    )


def anthropic_error_body(error: RequestError) -> bytes:
    """Return an error as JSON: `{"type": "error", "error": {"type", "message"}}`."""
    kind = _ERROR_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": error.message}})


def _check_messages(messages: Any) -> None:
    if not isinstance(messages, list) or not messages:
        raise RequestError(f"messages is {kind_of(messages)}. Send a list of messages.", param="messages")
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if not isinstance(message, dict):
            raise RequestError(f"{place} is {kind_of(message)}. Send an object.", param=place)
        if message.get("role") not in ("user", "assistant", "system"):
            raise RequestError(
                f'{place}.role must be "user" or "assistant". Send the system prompt in system.',
                param=f"{place}.role",
            )
        content = message.get("content")
        if isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise RequestError(
                f"{place}.content is {kind_of(content)}. Send a string or a list of content blocks.",
                param=f"{place}.content",
            )
        for position, block in enumerate(content):
            if not isinstance(block, dict) or not isinstance(block.get("type"), str):
                raise RequestError(
                    f'{place}.content[{position}] is not a content block. Send {{"type": "text", "text": "…"}}.',
                    param=f"{place}.content[{position}]",
                )


def _system(system: Any) -> list[Message]:
    """Return the system prompt as a message. Blocks with a billing header are dropped; a plain string is kept whole."""
    text = system if isinstance(system, str) else system_text(system)
    return [{"role": "system", "content": text}] if text else []


def system_text(content: Any) -> str:
    """Return the text of a system prompt as vLLM joins its blocks, without those that have a billing header."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    texts = (_text(block) for block in (blocks if isinstance(blocks, list) else ()))
    return "".join(text for text in texts if text and not text.startswith(BILLING_HEADER))


def _text(block: Any) -> str | None:
    match block:
        case {"type": "text", "text": str(text)}:
            return text
    return None


def _converted(message: dict[str, Any]) -> list[Message]:
    role, content = message["role"], message["content"]
    if role == "system":
        return [{"role": "system", "content": text}] if (text := system_text(content)) else []
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    return _user_messages(content) if role == "user" else [_assistant_message(content)]


def _user_messages(blocks: list[Block]) -> list[Message]:
    """Return a message for each tool result, then one for the user's own content."""
    messages = [message for block in blocks if block["type"] == "tool_result" for message in _tool_result(block)]
    parts = [part for block in blocks if (part := _part(block))]
    if parts:
        messages.append({"role": "user", "content": _content(parts)})
    return messages


def _assistant_message(blocks: list[Block]) -> Message:
    message: Message = {"role": "assistant"}
    thoughts = [block["thinking"] for block in blocks if isinstance(block.get("thinking"), str)]
    calls = [_tool_call(block) for block in blocks if block["type"] == "tool_use"]
    parts = [part for block in blocks if (part := _part(block))]
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if parts:
        message["content"] = _content(parts)
    return message


def _part(block: Block) -> dict[str, Any] | None:
    """Return a block as a part of a chat message's content; None for other types of blocks."""
    match block:
        case {"type": "text", "text": str(text)} if text:
            return {"type": "text", "text": text}
        case {"type": "image", "source": dict(source)}:
            return _image(source)
    return None


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    match parts:
        case [{"type": "text", "text": str(text)}]:
            return text
    return parts


def _image(source: dict[str, Any]) -> dict[str, Any]:
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_call(block: Block) -> dict[str, Any]:
    function = {"name": block.get("name") or "", "arguments": json.dumps(block.get("input") or {})}
    return {"id": block.get("id") or "", "type": "function", "function": function}


def _tool_result(block: Block) -> list[Message]:
    content, call = block.get("content"), block.get("tool_use_id") or ""
    if not isinstance(content, list):
        return [{"role": "tool", "tool_call_id": call, "content": content if isinstance(content, str) else ""}]
    inner = [item for item in content if isinstance(item, dict)]
    texts = [str(item.get("text", "")) for item in inner if item.get("type") == "text"]
    images = [_image(item["source"]) for item in inner if isinstance(item.get("source"), dict)]
    named = [
        {"type": "tool_reference", "name": name}
        for item in inner
        if item.get("type") == "tool_reference" and (name := item.get("tool_name") or item.get("name"))
    ]
    messages: list[Message] = [{"role": "tool", "tool_call_id": call, "content": "\n".join(texts)}]
    if images:
        messages.append({"role": "user", "content": images})
    if named:
        messages.append({"role": "tool", "tool_call_id": call, "content": named})
    return messages


def _tools(tools: Any, messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Return the tools in the chat format, after the additions and removals in system messages."""
    changes = [
        (block["type"], block["tool"])
        for message in messages
        if isinstance(message["content"], list)
        for block in message["content"]
        if block["type"] in ("tool_addition", "tool_removal") and isinstance(block.get("tool"), dict)
    ]
    if not isinstance(tools, list):
        if not changes:
            return None
        tools = []
    known = {tool.get("name"): tool for tool in tools if isinstance(tool, dict)}
    removed = set()
    for change, tool in changes:
        definition = tool.get("definition")
        if isinstance(definition, dict):
            known[definition.get("name")] = definition
        name = definition.get("name") if isinstance(definition, dict) else tool.get("name")
        if change == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
            if name in known and not isinstance(definition, dict):
                known[name] = known[name] | {"defer_loading": None}
    return [_tool(tool) for name, tool in known.items() if name not in removed]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    schema = tool.get("input_schema")
    if isinstance(schema, dict) and "type" not in schema:
        schema = schema | {"type": "object"}
    function = {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}
    others = {key: tool.get(key) for key in ("strict", "defer_loading")}
    return {"type": "function", "function": function | others}
