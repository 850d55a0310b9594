"""JSON bodies of which a few fields change; the values of all others stay the bytes they were."""

from __future__ import annotations

from typing import Any

import msgspec

from http_api.errors import RequestError
from router.apis.json_edit import SpliceError, with_field

Fields = dict[str, msgspec.Raw]

# How many answers a prompt wants, in the words of the engines; and those by which it is one.
_SEVERAL = ("n", "best_of", "num_return_sequences", "use_beam_search")
_ONE = frozenset((b"1", b"null", b"false"))

_decode = msgspec.json.Decoder(Fields).decode
_encode = msgspec.json.Encoder().encode


def fields_of(body: bytes) -> Fields:
    """The fields of an object, each as it stands. Raises RequestError (400)."""
    try:
        return _decode(body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"The body is not a JSON object: {error}. Send one.") from error


def with_fields(body: bytes, **values: Any) -> bytes:
    """The object with these fields, in place of any of their names. Raises RequestError (400)."""
    try:
        for name, value in values.items():
            body = with_field(body, name, _encode(value))
    except SpliceError as error:
        raise RequestError(f"The body is not JSON: {error}. Send one JSON object, in UTF-8.") from error
    return body


def encoded(fields: Fields, **values: Any) -> bytes:
    """An object of these fields, some of which are new or changed."""
    return _encode(fields | {name: msgspec.Raw(_encode(value)) for name, value in values.items()})


def prompts_in(fields: Fields) -> int | None:
    """How many prompts a batch has; None for a request of one."""
    for name in ("prompt", "text", "input_ids"):
        value = msgspec.json.decode(fields[name]) if name in fields else None
        if isinstance(value, list) and value and not isinstance(value[0], int):
            return len(value)
    return None


def answers_in(fields: Fields) -> int | None:
    """How many answers are asked for, to all prompts together; None where that cannot be told."""
    prompts = prompts_in(fields)
    if "prompt_embeds" in fields and bytes(fields["prompt_embeds"]) != b"null":
        return None
    each = [bytes(fields[name]) for name in _SEVERAL if name in fields]
    return (prompts or 1) if all(value in _ONE for value in each) else None
