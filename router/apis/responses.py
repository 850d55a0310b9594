"""Requests to `/v1/responses`: the conversation that vLLM makes of instructions and input items.

If the request refers to earlier turns by `previous_response_id`, `router/apis/response_turns.py` adds those that are
known.
"""

from __future__ import annotations

import json
from typing import Any

from http_api.errors import RequestError
from router.apis.agent_hints import hints_in_body
from router.apis.body_fields import ResponsesFields
from router.apis.fields import kind_of, optional_string, read_body, salt_with
from router.apis.identities import find_identity
from router.apis.messages import media_options
from router.apis.requests import ChatPrompt, RoutedRequest
from router.apis.response_owners import StoredFields
from router.http.headers import HeaderItems

Message = dict[str, Any]


class UnconvertibleError(Exception):
    """An error for an item that vLLM refuses or that only another engine supports."""


def decode_responses(body: bytes, headers: HeaderItems = ()) -> RoutedRequest:
    """Parse what routing needs of the body. Raises RequestError (400) that names the invalid field."""
    fields = read_body(body, ResponsesFields)
    _check(fields.messages)
    return RoutedRequest(
        name=optional_string(fields.model, "model"),
        prompt=_prompt(fields),
        streamed=fields.stream or False,
        cache_salt=salt_with(optional_string(fields.cache_salt, "cache_salt"), fields.extra_key),
        other_prompts=bool(fields.extra_key),
        max_tokens=fields.max_output_tokens,
        priority=fields.priority or 0,
        identity=find_identity(headers, fields),
        hints=hints_in_body(fields.nvext),
        stored=optional_string(fields.previous_response_id, "previous_response_id") or _conversation(fields),
    )


def _conversation(fields: ResponsesFields) -> str | None:
    return StoredFields(conversation=fields.conversation).stored_id()


def _check(found: Any) -> None:
    """Refuse an input that cannot be routed."""
    if not isinstance(found, (str, list)):
        raise RequestError(f"input is {kind_of(found)}. Send a string or a list of items.", param="input")
    if isinstance(found, str):
        return
    for index, item in enumerate(found):
        if not isinstance(item, dict):
            raise RequestError(
                f'input[{index}] is {kind_of(item)}. Send an object: {{"role": "user", "content": "…"}}.',
                param=f"input[{index}]",
            )


def _prompt(fields: ResponsesFields) -> ChatPrompt | None:
    """Return the conversation; None if it cannot be converted."""
    try:
        messages = _chat(fields)
    except UnconvertibleError:
        return None
    if not messages:
        return None
    effort = fields.reasoning.get("effort") if isinstance(fields.reasoning, dict) else None
    continues = _continues(fields.messages)
    return ChatPrompt(
        messages,
        tools=_tools(fields.tools),
        reasoning_effort=effort if isinstance(effort, str) else None,
        chat_template_kwargs=fields.chat_template_kwargs if isinstance(fields.chat_template_kwargs, dict) else None,
        add_generation_prompt=not continues,
        continue_final_message=continues,
        add_special_tokens=True,  # /v1/chat/completions does not add them
        media_options=media_options(fields.mm_processor_kwargs, fields.media_io_kwargs),
    )


def _chat(fields: ResponsesFields) -> list[Message]:
    """Return the chat messages of a body. Raises UnconvertibleError."""
    chat: list[Message] = []
    if isinstance(fields.instructions, str) and fields.instructions:
        chat.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.messages, str):
        return [*chat, {"role": "user", "content": fields.messages}]
    for item in fields.messages:
        _add(chat, item)
    return chat


def _continues(given: str | list[dict[str, Any]]) -> bool:
    """Return whether the last item is an unfinished answer, which the request continues."""
    if isinstance(given, str) or not given:
        return False
    last = given[-1]
    return last.get("type", "message") in ("message", "reasoning") and last.get("status") in (
        "in_progress",
        "incomplete",
    )


def _add(messages: list[Message], item: dict[str, Any]) -> None:
    """Add an item to a chat. An assistant's reasoning, text and tool calls become one message."""
    message = item_message(item)
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if message["role"] != "assistant" or last is None:
        messages.append(message)
    elif "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    else:
        (key,) = message.keys() - {"role"}
        if last.get(key) is None:
            last[key] = message[key]
        else:
            messages.append(message)


def item_message(item: dict[str, Any]) -> Message:
    """Return the message that an item means by itself. Raises UnconvertibleError."""
    match item:
        case {"type": "function_call", "call_id": str(call_id), "name": str(name), "arguments": str(arguments)}:
            namespace = item.get("namespace")
            return _call(call_id, f"{namespace}__{name}" if namespace else name, arguments)
        case {"type": "custom_tool_call", "call_id": str(call_id), "name": str(name)}:
            return _call(call_id, name, json.dumps({"input": item.get("input") or ""}))
        case {"type": "function_call_output" | "custom_tool_call_output", "call_id": call_id}:
            return {"role": "tool", "content": item.get("output"), "tool_call_id": call_id}
        case {"type": "reasoning"}:
            return {"role": "assistant", "reasoning": _reasoning(item)}
        case {"role": "assistant", "content": str(content)}:
            return {"role": "assistant", "content": content}
        case {"role": "assistant", "content": [{"text": str(text)}, *_]}:
            return {"role": "assistant", "content": text}
        case {"role": str(role), "content": str() | list()} if item.get("type", "message") == "message":
            return {"role": role, "content": item["content"]}
    raise UnconvertibleError


def _reasoning(item: dict[str, Any]) -> str:
    match item:
        case {"encrypted_content": str(encrypted)} if encrypted:
            raise UnconvertibleError
        case {"content": [{"text": str(text)}, *_]} | {"summary": [{"text": str(text)}, *_]}:
            return text
    return ""


def _call(call_id: str, name: str, arguments: str) -> Message:
    call = {"id": call_id, "function": {"arguments": arguments, "name": name}, "type": "function"}
    return {"role": "assistant", "tool_calls": [call]}


# vLLM shows a tool with free-text input to the model as a function of one string, with this description.
_FREE_TEXT = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    """Return the tools in the chat format. Built-in tools of the server are not shown to the model."""
    if not isinstance(tools, list) or not tools:
        return None
    shown: list[dict[str, Any]] = []
    for tool in tools:
        match tool:
            case {"type": "function", "name": str()}:
                shown.append(tool)
            case {"type": "namespace", "name": namespace, "tools": [*inner]}:
                shown += [
                    each | {"name": f"{namespace}__{each.get('name')}"}
                    for each in inner
                    if isinstance(each, dict) and each.get("type") == "function"
                ]
            case {"type": "custom", "name": name}:
                shown.append({"name": name, "description": tool.get("description"), "parameters": _FREE_TEXT})
    return [{"type": "function", "function": tool} for tool in shown]
