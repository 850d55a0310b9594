"""Chats whose prompt may be sent as token ids, and the ids in their body.

An engine that receives ids skips its chat template. So the ids must be those that its own rendering would make. Fields
that are not known to leave the prompt alone, or to be rendered by the router in a form that trials cover, exclude it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from indexer.hashing import PackedPrompt
from router.apis.requests import ChatPrompt

# Fields that leave the prompt alone, whatever their value. vLLM 0.32 answered alike with and without ids.
_PLAIN: Final = frozenset(
    {
        *(
            "model",
            "messages",
            "stream",
            "user",
            "metadata",
            "session_id",
            "prompt_cache_key",
            "priority",
            "cache_salt",
        ),
        *("max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n"),
        *("stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words", "allowed_token_ids"),
        *("logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty", "parallel_tool_calls"),
        *("logprobs", "top_logprobs", "prompt_logprobs", "return_token_ids", "include_reasoning", "response_format"),
    }
)
# Fields that shape the prompt, with the values that the router renders as engines do. Null is a missing field.
_BOOLS: Final = (b"true", b"false")
_SHAPING: Final[dict[str, tuple[bytes, ...]]] = {
    "add_generation_prompt": _BOOLS,
    "continue_final_message": _BOOLS,
    "tool_choice": (b'"auto"', b'"required"'),
    "reasoning_effort": (b'"low"', b'"medium"', b'"high"'),
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

_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def may_send_ids(body: bytes, chat: ChatPrompt) -> bool:
    """Return whether a chat's prompt depends only on what the router renders, in forms that trials cover."""
    return all(_is_known(name, bytes(value)) for name, value in _decode_fields(body).items()) and all(
        map(_is_plain_message, chat.messages)
    )


def _is_known(name: str, value: bytes) -> bool:
    if name in _PLAIN:
        return True
    value = value.strip()
    if name in _SHAPING:
        return value == b"null" or value in _SHAPING[name]
    if name == "tools":
        tools = msgspec.json.decode(value)
        return tools is None or (isinstance(tools, list) and bool(tools) and all(map(_is_plain_tool, tools)))
    if name == "chat_template_kwargs":
        return _has_bools(value, _TEMPLATE_KWARGS)
    # The router asks for usage itself, if the client did not.
    return name == "stream_options" and (value == b"null" or b'"include_usage":true' in value.replace(b" ", b""))


def _has_bools(value: bytes, names: frozenset[str]) -> bool:
    given = msgspec.json.decode(value)
    return given is None or (
        isinstance(given, dict) and given.keys() <= names and all(type(each) is bool for each in given.values())
    )


def _is_plain_tool(tool: Any) -> bool:
    """Return whether a tool has the fields of the trial's tools, which every template receives unchanged."""
    if not isinstance(tool, dict) or tool.keys() != {"type", "function"} or tool["type"] != "function":
        return False
    function = tool["function"]
    return (
        isinstance(function, dict)
        and function.keys() == {"name", "description", "parameters"}
        and isinstance(function["name"], str)
        and isinstance(function["description"], str)
        and isinstance(function["parameters"], dict)
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
    return role == "user" and isinstance(content, list) and bool(content) and all(map(_is_text_part, content))


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


def _is_plain_call(call: Any) -> bool:
    if not isinstance(call, dict) or call.keys() != {"id", "type", "function"} or call["type"] != "function":
        return False
    function = call["function"]
    return (
        isinstance(call["id"], str)
        and isinstance(function, dict)
        and function.keys() == {"name", "arguments"}
        and isinstance(function["name"], str)
        and isinstance(function["arguments"], str)
    )


def with_prompt_ids(body: bytes, prompt: PackedPrompt) -> bytes:
    """Return a chat's body with its prompt's token ids, as vLLM reads them. The body has fields, none of this name."""
    ids = msgspec.json.encode(list(prompt))
    return b'%b,"kv_transfer_params":{"prompt_token_ids":%b}}' % (body[: body.rindex(b"}")], ids)
