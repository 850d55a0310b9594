"""JSON bodies of which a few fields change. The values of all other fields keep their bytes."""

from __future__ import annotations

from typing import Any

import msgspec

from http_api.errors import RequestError
from kvevents.decoding import json_reader, read_json
from router.apis.json_edit import SpliceError, strict_json, with_field

Fields = dict[str, msgspec.Raw]

# The engines' fields for the number of answers to a prompt, and the values that ask for one answer.
_SEVERAL = ("n", "best_of", "num_return_sequences", "use_beam_search")
_ONE = frozenset((b"1", b"null", b"false"))

_decode = json_reader(Fields)
_encode = msgspec.json.Encoder().encode


def fields_of(body: bytes) -> Fields:
    """Return the fields of a JSON object, each as its bytes. Raises RequestError (400)."""
    try:
        return _decode(body)
    except msgspec.DecodeError as error:
        raise RequestError(f"The body is not a JSON object: {error}. Send one.") from error


def answered_field(answer: bytes, name: str) -> msgspec.Raw | None:
    """Return a field of a worker's answer that requests carry on; None if it is missing or null.

    Raises ValueError for an answer that is no JSON object, and for a value that parsers read differently.
    """
    value = _decode(answer).get(name)
    if value is None or (text := bytes(value)) == b"null":
        return None
    strict_json(text)  # the decoder of fields does not look into strings
    return value


def with_fields(body: bytes, **values: Any) -> bytes:
    """Return a JSON object with these fields added or replaced. Raises RequestError (400)."""
    try:
        for name, value in values.items():
            body = with_field(body, name, _encode(value))
    except SpliceError as error:
        raise RequestError(f"The body is not JSON: {error}. Send one JSON object, in UTF-8.") from error
    return body


def encoded(fields: Fields, **values: Any) -> bytes:
    """Return a JSON object of `fields`, with `values` added or replaced."""
    return _encode(fields | {name: msgspec.Raw(_encode(value)) for name, value in values.items()})


def value_of(fields: Fields, name: str) -> Any:
    """Return the value of a field; None if it is missing. Raises RequestError (400) for a number beyond a double."""
    try:
        return read_json(fields[name]) if name in fields else None
    except msgspec.DecodeError as error:
        raise RequestError(f"The value of {name!r} cannot be read: {error}. Correct it.", param=name) from error


def prompts_in(fields: Fields) -> int | None:
    """Return the number of prompts in a batch; None if the request has a single prompt."""
    for name in ("prompt", "text", "input_ids"):
        value = value_of(fields, name)
        if isinstance(value, list) and value and not isinstance(value[0], int):
            return len(value)
    return None


def answers_in(fields: Fields) -> int | None:
    """Return the number of answers to all prompts together; None if it is not known."""
    prompts = prompts_in(fields)
    if "prompt_embeds" in fields and bytes(fields["prompt_embeds"]) != b"null":
        return None
    each = [bytes(fields[name]) for name in _SEVERAL if name in fields]
    return (prompts or 1) if all(value in _ONE for value in each) else None
