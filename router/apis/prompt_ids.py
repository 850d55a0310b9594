"""Chats whose prompt may be sent as token ids, and the ids in their body.

An engine that receives ids skips its chat template. So the ids must be those that its own rendering would make. Fields
that are not known to leave the prompt alone, or to be rendered by the router in a form that trials cover, exclude it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from indexer.hashing import PackedPrompt
from kvevents.decoding import json_reader, read_json
from router.apis.endpoints import ANTHROPIC, CHAT, RESPONSES
from router.apis.requests import ChatPrompt

# Fields that leave the prompt alone, whatever their value. vLLM 0.32 answered alike with and without ids.
_OF_ALL: Final = frozenset({"model", "stream", "metadata", "cache_salt", "temperature", "top_p", "top_k"})
_OF_OPENAI: Final = frozenset({"user", "session_id", "prompt_cache_key", "priority", "seed", "stop", "logit_bias"})
_PLAIN: Final[dict[str, frozenset[str]]] = {
    CHAT: _OF_ALL
    | _OF_OPENAI
    | {
        *("messages", "max_tokens", "max_completion_tokens", "min_tokens", "min_p", "n", "stop_token_ids"),
        *("include_stop_str_in_output", "ignore_eos", "bad_words", "allowed_token_ids", "repetition_penalty"),
        *("frequency_penalty", "presence_penalty", "parallel_tool_calls", "logprobs", "top_logprobs"),
        *("prompt_logprobs", "return_token_ids", "include_reasoning", "response_format"),
    },
    RESPONSES: _OF_ALL
    | _OF_OPENAI
    | {"instructions", "max_output_tokens", "store", "text", "top_logprobs"}
    | {"parallel_tool_calls", "include_reasoning"},
    ANTHROPIC: _OF_ALL | {"max_tokens", "stop_sequences"},
}
# Fields that shape the prompt, with the values that the router renders as engines do. Null is a missing field.
_BOOLS: Final = (b"true", b"false")
_OPENAI_CHOICES: Final = (b'"auto"', b'"required"')
_SHAPING: Final[dict[str, dict[str, tuple[bytes, ...]]]] = {
    CHAT: {
        "add_generation_prompt": _BOOLS,
        "continue_final_message": _BOOLS,
        "tool_choice": _OPENAI_CHOICES,
        "reasoning_effort": (b'"low"', b'"medium"', b'"high"'),
    },
    RESPONSES: {"tool_choice": _OPENAI_CHOICES, "background": (b"false",), "truncation": (b'"disabled"',)},
    ANTHROPIC: {},
}
_TEMPLATE_KWARGS: Final = frozenset({"enable_thinking", "thinking"})
_ROLES: Final = frozenset({"system", "developer", "user", "assistant", "tool"})
# Further fields of messages by role, with the type of their values.
_OF_ROLE: Final[dict[str, dict[str, type]]] = {
    "user": {"name": str},
    "assistant": {"tool_calls": list, "reasoning": str},
    "tool": {"tool_call_id": str},
}
_NONE: Final[dict[str, type]] = {}

_decode_fields = json_reader(dict[str, msgspec.Raw])


def may_send_ids(path: str, body: bytes, chat: ChatPrompt) -> bool:
    """Return whether a chat's prompt depends only on what the router renders, in forms that trials cover.

    The fields are read by msgspec, which refuses some values that other readers of the body accept, such as `1e400`.
    A body that it refuses is sent without ids.
    """
    try:
        return _may_send_ids(path, body, chat)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False


def _may_send_ids(path: str, body: bytes, chat: ChatPrompt) -> bool:
    plain, shaping = _PLAIN.get(path), _SHAPING.get(path)
    if plain is None or shaping is None:
        return False
    for name, raw in _decode_fields(body).items():
        if name in plain:
            continue
        value = bytes(raw).strip()
        if name in shaping:
            if value != b"null" and value not in shaping[name]:
                return False
        elif not (check := _CHECKS[path].get(name)) or not check(value):
            return False
    return path != CHAT or all(map(_is_plain_message, chat.messages))


def _has_bools(value: bytes) -> bool:
    given = read_json(value)
    return given is None or (
        isinstance(given, dict)
        and given.keys() <= _TEMPLATE_KWARGS
        and all(type(each) is bool for each in given.values())
    )


def _asks_usage(value: bytes) -> bool:
    # The router asks for usage itself, if the client did not.
    return value == b"null" or b'"include_usage":true' in value.replace(b" ", b"")


def _list_of(is_plain: Callable[[Any], bool], value: bytes) -> bool:
    given = read_json(value)
    return isinstance(given, list) and bool(given) and all(map(is_plain, given))


def _has(value: Any, strings: set[str], others: dict[str, type] | None = None, type_: str = "") -> bool:
    """Return whether an object has exactly these fields: `strings`, `others` with their types, and any `type`."""
    if not isinstance(value, dict):
        return False
    others = others or {}
    names = strings | others.keys() | ({"type"} if type_ else set())
    return (
        value.keys() == names
        and (not type_ or value["type"] == type_)
        and all(isinstance(value[name], str) for name in strings)
        and all(type(value[name]) is each for name, each in others.items())
    )


# Chats


def _are_plain_tools(value: bytes) -> bool:
    """Return whether tools have the fields of the trial's tools, which every template receives unchanged."""
    return value == b"null" or _list_of(_is_plain_tool, value)


def _is_plain_tool(tool: Any) -> bool:
    return _has(tool, set(), {"function": dict}, "function") and _has(
        tool["function"], {"name", "description"}, {"parameters": dict}
    )


def _is_plain_message(message: dict[str, Any]) -> bool:
    role = message["role"]
    if role not in _ROLES:
        return False
    known = _OF_ROLE.get(role, _NONE)
    for name, value in message.items():
        if name == "content":
            if not _is_plain_content(role, value):
                return False
        elif name != "role" and type(value) is not known.get(name):
            return False
    return all(map(_is_plain_call, message.get("tool_calls", ())))


def _is_plain_content(role: str, content: Any) -> bool:
    if isinstance(content, str):
        return True
    if role == "assistant" and content is None:
        return True
    return role == "user" and isinstance(content, list) and bool(content) and all(map(_is_text, content))


def _is_text(part: Any) -> bool:
    return _has(part, {"text"}, type_="text")


def _is_plain_call(call: Any) -> bool:
    return _has(call, {"id"}, {"function": dict}, "function") and _has(call["function"], {"name", "arguments"})


# Responses


def _is_plain_input(value: bytes) -> bool:
    return value[:1] == b'"' or _list_of(_is_plain_item, value)


def _is_plain_item(item: Any) -> bool:
    if _has(item, {"call_id", "name", "arguments"}, type_="function_call") or _has(
        item, {"call_id", "output"}, type_="function_call_output"
    ):
        return True
    if _has(item, {"role", "content"}) or _has(item, {"role", "content"}, type_="message"):
        return item["role"] in ("user", "assistant")
    is_list = _has(item, {"role"}, {"content": list}) or _has(item, {"role"}, {"content": list}, "message")
    return is_list and item["role"] == "user" and all(map(_is_input_text, item["content"]))


def _is_input_text(part: Any) -> bool:
    return _has(part, {"text"}, type_="input_text")


def _are_functions(value: bytes) -> bool:
    return value in (b"null", b"[]") or _list_of(
        lambda tool: _has(tool, {"name", "description"}, {"parameters": dict, "strict": bool}, "function"), value
    )


# Messages


def _without_cache_control(value: Any) -> Any:
    """Return a block without the field that engines ignore."""
    if isinstance(value, dict) and "cache_control" in value:
        return {name: each for name, each in value.items() if name != "cache_control"}
    return value


def _is_plain_system(value: bytes) -> bool:
    return value[:1] == b'"' or value == b"null" or _list_of(_is_text_block, value)


def _is_text_block(block: Any) -> bool:
    return _is_text(_without_cache_control(block))


def _are_plain_turns(value: bytes) -> bool:
    return _list_of(_is_plain_turn, value)


def _is_plain_turn(turn: Any) -> bool:
    if _has(turn, {"role", "content"}):
        return turn["role"] in ("user", "assistant")
    if not _has(turn, {"role"}, {"content": list}):
        return False
    is_plain = {"user": _is_plain_question, "assistant": _is_plain_answer}.get(turn["role"])
    return is_plain is not None and bool(turn["content"]) and all(map(is_plain, turn["content"]))


def _is_plain_question(block: Any) -> bool:
    block = _without_cache_control(block)
    return (
        _is_text(block)
        or _has(block, {"tool_use_id", "content"}, type_="tool_result")
        or (
            _has(block, {"tool_use_id"}, {"content": list}, "tool_result")
            and bool(block["content"])
            and all(map(_is_text, block["content"]))
        )
    )


def _is_plain_answer(block: Any) -> bool:
    block = _without_cache_control(block)
    return (
        _is_text(block)
        or _has(block, {"thinking", "signature"}, type_="thinking")
        or _has(block, {"id", "name"}, {"input": dict}, "tool_use")
    )


def _is_auto(value: bytes) -> bool:
    choice = read_json(value)
    return choice is None or (_has(choice, {"type"}) and choice["type"] in ("auto", "any"))


def _is_thinking(value: bytes) -> bool:
    """Return whether thinking is left to the model, or limited while it answers."""
    thinking = read_json(value)
    return thinking is None or (isinstance(thinking, dict) and thinking.get("type") in ("enabled", "adaptive"))


def _are_schemas(value: bytes) -> bool:
    return value == b"null" or _list_of(
        lambda tool: _has(_without_cache_control(tool), {"name", "description"}, {"input_schema": dict}), value
    )


_CHECKS: Final[dict[str, dict[str, Callable[[bytes], bool]]]] = {
    CHAT: {"tools": _are_plain_tools, "chat_template_kwargs": _has_bools, "stream_options": _asks_usage},
    RESPONSES: {"input": _is_plain_input, "tools": _are_functions},
    ANTHROPIC: {
        "system": _is_plain_system,
        "messages": _are_plain_turns,
        "tools": _are_schemas,
        "tool_choice": _is_auto,
        "thinking": _is_thinking,
    },
}


# The fields of chats that leave SGLang's prompt alone.
_OF_SGLANG: Final = _PLAIN[CHAT] - {"bad_words", "allowed_token_ids", "prompt_logprobs", "include_reasoning"} | {
    "stream_options"
}


def is_plain_text(path: str, body: bytes, chat: ChatPrompt) -> bool:
    """Return whether a prompt that `may_send_ids` is a chat of texts alone."""
    return (
        path == CHAT
        and _decode_fields(body).keys() <= _OF_SGLANG
        and all(message.keys() == {"role", "content"} and message["role"] != "tool" for message in chat.messages)
    )


def with_input_ids(body: bytes, prompt: PackedPrompt) -> bytes:
    """Return a body with its prompt's token ids, as SGLang reads them. The body has fields, none of this name."""
    return prompt.json(_continued(body, b',"input_ids":'), b"}")


def with_prompt_ids(body: bytes, prompt: PackedPrompt) -> bytes:
    """Return a body with its prompt's token ids, as vLLM reads them. The body has fields, none of this name."""
    return prompt.json(_continued(body, b',"kv_transfer_params":{"prompt_token_ids":'), b"}}")


def _continued(body: bytes, more: bytes) -> bytes:
    """Return a JSON object without its end, followed by `more`."""
    return b"".join((memoryview(body)[: body.rindex(b"}")], more))
