"""Fields of request bodies: lenient parsing, and errors that name the field.

A body reaches the worker as the client sent it, and the worker checks most of it. The router refuses only what no
worker accepts and what cannot be routed. Like vLLM, it accepts `"5"` for a number.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, get_args

import msgspec

from http_api.errors import RequestError

MAX_TOKEN_ID = 2**32 - 1

T = TypeVar("T")
D = TypeVar("D")
S = TypeVar("S", bound=msgspec.Struct)


def read_body(body: bytes, kind: type[S]) -> S:
    """Parse the fields of a body that `kind` has. Raises RequestError for other JSON.

    Fields of `kind` have any type, or are integers or booleans, which are read leniently: None if they are missing or
    cannot be converted.
    """
    decode: Callable[[bytes], S] = _decoder(kind).decode
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return _read_leniently(body, kind)


def _read_leniently(body: bytes, kind: type[S]) -> S:
    """Parse a body that is not as usual, as `read_body` does."""
    untyped = _untyped(kind)
    decode: Callable[[bytes], msgspec.Struct] = _decoder(untyped).decode
    try:
        fields = decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        # Engines decode with Python's json, which accepts NaN, 1e400 and a byte order mark; msgspec does not.
        try:
            found = json.loads(body)
            if not isinstance(found, dict):
                raise RequestError(f"The body is {kind_of(found)}. Send one JSON object.") from None
            fields = decode(msgspec.json.encode(found))
        except (ValueError, RecursionError) as error:
            raise RequestError(f"The body is not JSON: {error}. Send one JSON object, in UTF-8.") from error
    values = {field.name: getattr(fields, field.name) for field in msgspec.structs.fields(kind)}
    for field in msgspec.structs.fields(kind):
        if field.type is not Any:
            values[field.name] = lenient(values[field.name], get_args(field.type)[0], None)
    return kind(**values)


@cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


@cache
def _untyped(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a struct with the fields of another one, each of any type."""
    fields = [
        (field.name, Any, msgspec.field(default=None, name=field.encode_name)) for field in msgspec.structs.fields(kind)
    ]
    return msgspec.defstruct(kind.__name__, fields)


def lenient(value: Any, kind: type[T], default: D) -> T | D:
    """Return the value as this type, also from a string such as "5" or "true"; `default` if it cannot be converted."""
    if value is None:
        return default
    if type(value) is kind:
        return value
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return default


def model_name(value: Any) -> str:
    """Return the model's name. Raises RequestError if it is missing."""
    if not isinstance(value, str) or not value:
        raise RequestError(f"model is {kind_of(value)}. Send the name of a served model.", param="model")
    return value


def optional_string(value: Any, param: str) -> str | None:
    """Return a non-empty string or None. Raises RequestError for any other value."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise RequestError(f"{param} is {kind_of(value)}. Send a non-empty string, or omit it.", param=param)
    return value


def token_ids(value: object, param: str, advice: str = "Send a list of token ids.") -> list[int]:
    """Return a list of token ids. Raises RequestError that names the first invalid one."""
    if not isinstance(value, list) or not value:
        raise RequestError(f"{param} is {kind_of(value)}. {advice}", param=param)
    if set(map(type, value)) != {int}:
        try:
            return token_ids(msgspec.convert(value, list[int], strict=False), param)
        except msgspec.ValidationError as error:
            raise RequestError(f"{param} is a list of {kinds_of(value)}. {advice}", param=param) from error
    if min(value) < 0 or max(value) > MAX_TOKEN_ID:
        place, bad = next((place, token) for place, token in enumerate(value) if not 0 <= token <= MAX_TOKEN_ID)
        raise RequestError(f"{param}[{place}] is {bad}. Send token ids from 0 to {MAX_TOKEN_ID}.", param=param)
    return value


# JSON's types in words: for one value, and for the values of a list.
_KINDS: dict[type, tuple[str, str]] = {
    type(None): ("missing", "nulls"),
    str: ("a string", "strings"),
    bool: ("a boolean", "booleans"),
    int: ("a number", "numbers"),
    float: ("a number", "numbers"),
    list: ("a list", "lists"),
    dict: ("an object", "objects"),
}


def kind_of(value: Any) -> str:
    """Return the JSON type of a value in words."""
    if value == "":
        return "an empty string"
    return "an empty list" if value == [] else _KINDS[type(value)][0]


def kinds_of(values: list[Any]) -> str:
    """Return the JSON types of a list's values in words."""
    return " and ".join(sorted({_KINDS[type(value)][1] for value in values}))


def adapter_of(lora_path: object) -> str | None:
    """Return the adapter in SGLang's `lora_path`: a name, or one for each prompt if they are equal; else None."""
    names = lora_path if isinstance(lora_path, list) and lora_path else [lora_path]
    first = names[0]
    return first if isinstance(first, str) and first and all(name == first for name in names) else None


def has_unlike_adapters(lora_path: object) -> bool:
    """Return whether `lora_path` has different adapters for the prompts of a request."""
    return isinstance(lora_path, list) and any(name != lora_path[0] for name in lora_path)


def salt_with(cache_salt: str | None, extra_key: object) -> str | None:
    """Return a salt that also contains SGLang's `extra_key`, which separates prefixes and is in no event."""
    if not extra_key:
        return cache_salt
    return f"{cache_salt or ''}\0{msgspec.json.encode(extra_key).decode()}"
