"""Strict parsing of JSON bodies, and edits of single fields in a body's bytes.

An edit changes one field of a JSON object; all other bytes stay as the client sent them. Bytes are decoded as Latin-1,
one character per byte: JSON's syntax is ASCII, so positions in the text are positions in the bytes.

For long bodies the native core makes an outline, in which strings are empty. It releases the interpreter's lock
meanwhile. Without the native core there are no outlines.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any, Final, NamedTuple

import jiter

from indexer.native import native_core

# Bodies of up to this many bytes are parsed directly: that is fast enough.
LONG: Final = 64 * 1024
_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


class OutlineField(NamedTuple):
    """The position of one top-level field in a body's bytes: its name with quotes, and its value."""

    name_start: int
    name_end: int
    start: int
    end: int


class Outline(NamedTuple):
    """A JSON body with empty strings, except for names, and the positions of its top-level fields.

    `values`: the number of values. Beyond the limit of `read_outline`, text and fields are incomplete.
    """

    text: bytes
    fields: list[OutlineField]
    values: int


def read_outline(body: bytes, most_values: int = sys.maxsize) -> Outline | None:
    """Return the outline of a long body; None without a native core. Its errors stay, for the body's parser.

    Raises ValueError for a string that parsers read differently.
    """
    native = native_core() if len(body) > LONG else None
    if native is None:
        return None
    made = native.json_outline(body, most_values)
    if made is None:
        raise ValueError("parsers read one of its strings differently")
    text, fields, values = made
    return Outline(text, [OutlineField(*each) for each in fields], values)


def strict_json(text: bytes) -> Any:
    """Parse JSON that every parser reads alike. Raises ValueError for duplicate names, NaN and invalid text."""
    return jiter.from_json(text, allow_inf_nan=False, cache_mode="none", catch_duplicate_keys=True)


class SpliceError(ValueError):
    """An error for a body that is not a JSON object in UTF-8."""


class _Field(NamedTuple):
    name: str
    name_start: int
    start: int  # of its value
    end: int


def field(body: bytes, name: str) -> bytes | None:
    """Return an object's encoded field, of equal names the last; None if it is missing. Raises SpliceError."""
    span = field_span(body, name)
    return None if span is None else body[span[0] : span[1]]


def field_span(body: bytes, name: str) -> tuple[int, int] | None:
    """Return the position of an object's field, of equal names the last; None if it is missing. Raises SpliceError."""
    found = [(each.start, each.end) for each in _fields(body) if each.name == name]
    return found[-1] if found else None


def with_field(body: bytes, name: str, value: bytes) -> bytes:
    """Return the object with this field, which replaces any field of the same name. Raises SpliceError."""
    fields = list(_fields(body))
    places = [each for each in fields if each.name == name]
    for each in reversed(places):
        body = body[: each.start] + value + body[each.end :]
    if places:
        return body
    end = fields[-1].end if fields else body.index(b"{") + 1
    return body[:end] + (b"," if fields else b"") + json.dumps(name).encode() + b":" + value + body[end:]


def without_fields(body: bytes, names: Collection[str]) -> bytes:
    """Return the object without the fields of these names. Raises SpliceError."""
    return b"{%b}" % b",".join(body[each.name_start : each.end] for each in _fields(body) if each.name not in names)


def _fields(body: bytes) -> Iterator[_Field]:
    try:
        outline = read_outline(body)
    except ValueError as error:
        raise SpliceError(str(error)) from error
    return _fields_of_text(body.decode("latin-1")) if outline is None else _outlined_fields(body, outline)


def _outlined_fields(body: bytes, outline: Outline) -> Iterator[_Field]:
    try:
        if not isinstance(json.loads(outline.text), dict):
            raise SpliceError("not an object")
    except (ValueError, RecursionError) as error:
        raise SpliceError(str(error)) from error
    for each in outline.fields:
        yield _Field(json.loads(body[each.name_start : each.name_end]), each.name_start, each.start, each.end)


def _fields_of_text(text: str) -> Iterator[_Field]:
    """Yield the fields of an object. Raises SpliceError unless the object is the whole text."""
    try:
        at = _expect(text, 0, "{")
        if text[at] != "}":
            while True:
                name_start = at
                name, at = _decode(text, at)
                if not isinstance(name, str):
                    raise ValueError(f"expected a name at {at}")
                start = _expect(text, at, ":")
                _, end = _decode(text, start)
                yield _Field(name, name_start, start, end)
                at = _skip(text, end)
                if text[at] != ",":
                    break
                at = _skip(text, at + 1)
        if _expect(text, at, "}") != len(text):
            raise ValueError("unexpected bytes after the object")
    except (ValueError, IndexError, RecursionError) as error:
        raise SpliceError(str(error)) from error


def _expect(text: str, at: int, character: str) -> int:
    """Return the position after the expected character and the white space that follows it."""
    at = _skip(text, at)
    if text[at] != character:
        raise ValueError(f"expected {character!r} at {at}")
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
