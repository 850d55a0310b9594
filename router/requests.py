"""Read the bodies of the routed endpoints: the model, the prompt, and what else decides where a request goes.

Only that is read. A body reaches the worker as the client sent it, and the worker judges the rest of it: refused here
is what no worker accepts and what cannot be routed. As vLLM does, this takes `"5"` where a number belongs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec

from indexer.errors import RequestError

MAX_TOKEN_ID = 2**32 - 1
# OpenAI's default for /v1/completions. A chat has none.
COMPLETION_MAX_TOKENS = 16

T = TypeVar("T")
D = TypeVar("D")


class Endpoint(StrEnum):
    """The routed endpoints, by their path."""

    CHAT_COMPLETIONS = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Truncation:
    """Keep only this many tokens of a prompt: its last ones ("left" cuts the start off) or its first ("right")."""

    tokens: int
    side: Literal["left", "right"] = "left"


@dataclass(frozen=True, slots=True)
class TextPrompts:
    """Prompts to tokenize as they are; one sequence each."""

    texts: list[str]
    add_special_tokens: bool = True
    truncation: Truncation | None = None


@dataclass(frozen=True, slots=True)
class TokenPrompts:
    """Prompts that are token ids already; one list each. Empty when the prompts are embeddings, which have none.

    `param` is the body's field they came from.
    """

    token_ids: list[list[int]]
    truncation: Truncation | None = None
    param: str = "prompt"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation and all that changes how the chat template renders it. The messages are kept whole."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    truncation: Truncation | None = None


Prompt: TypeAlias = TextPrompts | TokenPrompts | ChatPrompt


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request to a routed endpoint. `max_tokens` bounds each of the `n` answers to a prompt; None is no bound."""

    model: str
    prompt: Prompt
    stream: bool = False
    cache_salt: str | None = None
    max_tokens: int | None = None
    n: int = 1
    priority: int = 0
    user: str | None = None


@dataclass(frozen=True, slots=True)
class MatchRequest:
    """A question to `/match`: who holds a prefix of this prompt?"""

    model: str
    prompt: Prompt
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str | None = None


class _Body(msgspec.Struct):
    """The fields of all the bodies, untyped: the checks below say more about a bad one than a decoder does."""

    model: Any = None
    stream: Any = None
    prompt: Any = None
    prompt_embeds: Any = None
    token_ids: Any = None
    messages: Any = None
    tools: Any = None
    documents: Any = None
    reasoning_effort: Any = None
    chat_template: Any = None
    chat_template_kwargs: Any = None
    add_generation_prompt: Any = None
    continue_final_message: Any = None
    add_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    truncation_side: Any = None
    cache_salt: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    priority: Any = None
    user: Any = None
    lora_name: Any = None
    tenant_id: Any = None


def decode_request(endpoint: Endpoint, body: bytes) -> RoutedRequest:
    """What routing needs of a body. Raises RequestError (400) naming the field at fault."""
    fields = _read(body)
    model = _model(fields)
    prompt: Prompt
    if endpoint is Endpoint.CHAT_COMPLETIONS:
        prompt = _chat_prompt(fields)
        max_tokens = _lenient(fields.max_completion_tokens, int, _lenient(fields.max_tokens, int, None))
    else:
        embedded = fields.prompt is None and fields.prompt_embeds is not None
        prompt = TokenPrompts([]) if embedded else _prompt(fields)
        max_tokens = _lenient(fields.max_tokens, int, COMPLETION_MAX_TOKENS)
    return RoutedRequest(
        model=model,
        prompt=prompt,
        stream=_lenient(fields.stream, bool, False),
        cache_salt=_optional_string(fields.cache_salt, "cache_salt"),
        max_tokens=max_tokens,
        n=_lenient(fields.n, int, 1),
        priority=_lenient(fields.priority, int, 0),
        user=fields.user if isinstance(fields.user, str) else None,
    )


def decode_match(body: bytes) -> MatchRequest:
    """What a `/match` body asks. Raises RequestError (400) naming the field at fault."""
    fields = _read(body)
    model = _model(fields)
    given = [name for name in ("token_ids", "prompt", "messages") if getattr(fields, name) is not None]
    if len(given) != 1:
        raise RequestError(
            f"Found {' and '.join(given) or 'no prompt'}. Send exactly one of token_ids, prompt and messages.",
            param=given[0] if given else "prompt",
        )
    prompt: Prompt
    if fields.messages is not None:
        prompt = _chat_prompt(fields)
    elif fields.prompt is not None:
        prompt = _prompt(fields)
    else:
        prompt = TokenPrompts([_token_ids(fields.token_ids, "token_ids")], _truncation(fields), "token_ids")
    return MatchRequest(
        model=model,
        prompt=prompt,
        lora_name=_optional_string(fields.lora_name, "lora_name"),
        cache_salt=_optional_string(fields.cache_salt, "cache_salt"),
        tenant_id=_optional_string(fields.tenant_id, "tenant_id"),
    )


_decode = msgspec.json.Decoder(_Body).decode


def _read(body: bytes) -> _Body:
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    # Engines decode with Python's json, which takes what msgspec does not: NaN, 1e400, a byte order mark.
    try:
        found = json.loads(body)
        if isinstance(found, dict):
            return _decode(msgspec.json.encode(found))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}. Send one JSON object, in UTF-8.") from error
    raise RequestError(f"The body is {_kind(found)}. Send one JSON object.")


def _model(fields: _Body) -> str:
    if not isinstance(fields.model, str) or not fields.model:
        raise RequestError(f"model is {_kind(fields.model)}. Send the name of a served model.", param="model")
    return fields.model


def _chat_prompt(fields: _Body) -> ChatPrompt:
    return ChatPrompt(
        messages=_messages(fields.messages),
        tools=fields.tools if isinstance(fields.tools, list) else None,
        documents=fields.documents if isinstance(fields.documents, list) else None,
        reasoning_effort=fields.reasoning_effort if isinstance(fields.reasoning_effort, str) else None,
        chat_template=fields.chat_template if isinstance(fields.chat_template, str) else None,
        chat_template_kwargs=fields.chat_template_kwargs if isinstance(fields.chat_template_kwargs, dict) else None,
        add_generation_prompt=_lenient(fields.add_generation_prompt, bool, True),
        continue_final_message=_lenient(fields.continue_final_message, bool, False),
        add_special_tokens=_lenient(fields.add_special_tokens, bool, False),
        truncation=_truncation(fields),
    )


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise RequestError(
            f'messages is {_kind(messages)}. Send a list of messages: [{{"role": "user", "content": "…"}}].',
            param="messages",
        )
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RequestError(
                f'messages[{index}] is {_kind(message)}. Send an object: {{"role": "user", "content": "…"}}.',
                param=f"messages[{index}]",
            )
        if not isinstance(message.get("role"), str):
            raise RequestError(
                f"messages[{index}].role is {_kind(message.get('role'))}. "
                'Send a string: "system", "user", "assistant" or "tool".',
                param=f"messages[{index}].role",
            )
        content = message.get("content")
        if content is None or isinstance(content, str):
            continue
        if not isinstance(content, list):
            raise RequestError(
                f"messages[{index}].content is {_kind(content)}. "
                'Send a string or a list of parts: [{"type": "text", "text": "…"}].',
                param=f"messages[{index}].content",
            )
        for place, part in enumerate(content):
            if not isinstance(part, (dict, str)):
                raise RequestError(
                    f"messages[{index}].content[{place}] is {_kind(part)}. "
                    'Send an object: {"type": "text", "text": "…"}.',
                    param=f"messages[{index}].content[{place}]",
                )
    return messages


_PROMPT_FORMS = "Send a string, a list of strings, a list of token ids, or a list of lists of token ids."


def _prompt(fields: _Body) -> TextPrompts | TokenPrompts:
    prompt, truncation = fields.prompt, _truncation(fields)
    add_special_tokens = _lenient(fields.add_special_tokens, bool, True)
    if isinstance(prompt, str) and prompt:
        return TextPrompts([prompt], add_special_tokens, truncation)
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(f"prompt is {_kind(prompt)}. {_PROMPT_FORMS}", param="prompt")
    types = set(map(type, prompt))
    if types == {str}:
        return TextPrompts(prompt, add_special_tokens, truncation)
    if types == {list}:
        lists = [_token_ids(token_ids, f"prompt[{index}]") for index, token_ids in enumerate(prompt)]
        return TokenPrompts(lists, truncation)
    if list in types or dict in types:
        raise RequestError(f"prompt is a list of {_kinds(prompt)}. {_PROMPT_FORMS}", param="prompt")
    return TokenPrompts([_token_ids(prompt, "prompt")], truncation)


def _token_ids(token_ids: object, param: str) -> list[int]:
    if not isinstance(token_ids, list) or not token_ids:
        raise RequestError(f"{param} is {_kind(token_ids)}. Send a list of token ids.", param=param)
    if set(map(type, token_ids)) != {int}:
        try:
            return _token_ids(msgspec.convert(token_ids, list[int], strict=False), param)
        except msgspec.ValidationError as error:
            advice = _PROMPT_FORMS if param == "prompt" else "Send a list of token ids."
            raise RequestError(f"{param} is a list of {_kinds(token_ids)}. {advice}", param=param) from error
    if min(token_ids) < 0 or max(token_ids) > MAX_TOKEN_ID:
        place, bad = next((place, token) for place, token in enumerate(token_ids) if not 0 <= token <= MAX_TOKEN_ID)
        raise RequestError(f"{param}[{place}] is {bad}. Send token ids from 0 to {MAX_TOKEN_ID}.", param=param)
    return token_ids


def _truncation(fields: _Body) -> Truncation | None:
    tokens = _lenient(fields.truncate_prompt_tokens, int, None)
    # -1 stands for all that the model's context holds, and a longer prompt is refused by the worker.
    if tokens is None or tokens < 0:
        return None
    return Truncation(tokens, "right" if fields.truncation_side == "right" else "left")


def _optional_string(value: Any, param: str) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param} is {_kind(value)}. Send a string that is not empty, or leave it out.", param=param)
    return value


def _lenient(value: Any, kind: type[T], default: D) -> T | D:
    """The value as this kind, also from a string such as "5" or "true". What does not fit is the worker's to refuse."""
    if value is None:
        return default
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return default


# JSON's kinds: what one value is, and what a list of many is a list of.
_KINDS: dict[type, tuple[str, str]] = {
    type(None): ("missing", "nulls"),
    str: ("a string", "strings"),
    bool: ("a boolean", "booleans"),
    int: ("a number", "numbers"),
    float: ("a number", "numbers"),
    list: ("a list", "lists"),
    dict: ("an object", "objects"),
}


def _kind(value: Any) -> str:
    if value == "":
        return "an empty string"
    return "an empty list" if value == [] else _KINDS[type(value)][0]


def _kinds(values: list[Any]) -> str:
    return " and ".join(sorted({_KINDS[type(value)][1] for value in values}))
