"""The fields of a request's body: read without judging what is not ours to judge, refused by name when they are.

A body reaches the worker as the client sent it, and the worker judges the rest of it: refused here is what no worker
accepts and what cannot be routed. As vLLM does, this takes `"5"` where a number belongs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import msgspec

from http_api.errors import RequestError

MAX_TOKEN_ID = 2**32 - 1

T = TypeVar("T")
D = TypeVar("D")
S = TypeVar("S", bound=msgspec.Struct)


def read_body(body: bytes, kind: type[S]) -> S:
    """The fields of a body that a struct of untyped fields names. Raises RequestError when it is no JSON object."""
    decode: Callable[[bytes], S] = _decoder(kind).decode
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        pass
    # Engines decode with Python's json, which takes what msgspec does not: NaN, 1e400, a byte order mark.
    try:
        found = json.loads(body)
        if isinstance(found, dict):
            return decode(msgspec.json.encode(found))
    except (ValueError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}. Send one JSON object, in UTF-8.") from error
    raise RequestError(f"The body is {kind_of(found)}. Send one JSON object.")


@cache
def _decoder(kind: type[msgspec.Struct]) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def lenient(value: Any, kind: type[T], default: D) -> T | D:
    """The value as this kind, also from a string such as "5" or "true". What does not fit is the worker's to refuse."""
    if value is None:
        return default
    if type(value) is kind:
        return value
    try:
        return msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return default


def model_name(value: Any) -> str:
    """The name of the model. Raises RequestError when there is none."""
    if not isinstance(value, str) or not value:
        raise RequestError(f"model is {kind_of(value)}. Send the name of a served model.", param="model")
    return value


def optional_string(value: Any, param: str) -> str | None:
    """A string that is not empty, or None. Raises RequestError for anything else."""
    if value is None:
        return None
    if not isinstance(value, str) or not value:
        raise RequestError(
            f"{param} is {kind_of(value)}. Send a string that is not empty, or leave it out.", param=param
        )
    return value


def token_ids(value: object, param: str, advice: str = "Send a list of token ids.") -> list[int]:
    """A list of token ids. Raises RequestError naming the first that is none."""
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


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    if value == "":
        return "an empty string"
    return "an empty list" if value == [] else _KINDS[type(value)][0]


def kinds_of(values: list[Any]) -> str:
    """What a list is a list of."""
    return " and ".join(sorted({_KINDS[type(value)][1] for value in values}))
