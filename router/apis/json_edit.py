"""Changing one field of a JSON object in its bytes: all others stay as they were sent.

Bytes are read as Latin-1, one character each: what JSON is made of is ASCII, so places in the text are places in the
bytes, and whatever a string holds comes out as it went in. Of long bodies only the skeleton is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from router.apis.strict_json import Skeleton, skeleton_of

_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


class SpliceError(ValueError):
    """Not a JSON object in UTF-8."""


class _Field(NamedTuple):
    name: str
    name_start: int
    start: int  # of its value
    end: int


def field(body: bytes, name: str) -> bytes | None:
    """The value of an object's field as it stands; the last one's, as parsers have it. Raises SpliceError."""
    found = [body[each.start : each.end] for each in _fields(body) if each.name == name]
    return found[-1] if found else None


def with_field(body: bytes, name: str, value: bytes) -> bytes:
    """The object with this field, in place of any of that name. Raises SpliceError."""
    fields = list(_fields(body))
    places = [each for each in fields if each.name == name]
    for each in reversed(places):
        body = body[: each.start] + value + body[each.end :]
    if places:
        return body
    end = fields[-1].end if fields else body.index(b"{") + 1
    return body[:end] + (b"," if fields else b"") + json.dumps(name).encode() + b":" + value + body[end:]


def without_fields(body: bytes, names: Collection[str]) -> bytes:
    """The object without the fields of these names. Raises SpliceError."""
    return b"{%b}" % b",".join(body[each.name_start : each.end] for each in _fields(body) if each.name not in names)


def _fields(body: bytes) -> Iterator[_Field]:
    try:
        skeleton = skeleton_of(body)
    except ValueError as error:
        raise SpliceError(str(error)) from error
    return _fields_of_text(body.decode("latin-1")) if skeleton is None else _fields_of_long(body, skeleton)


def _fields_of_long(body: bytes, skeleton: Skeleton) -> Iterator[_Field]:
    try:
        if not isinstance(json.loads(skeleton.text), dict):
            raise SpliceError("no object")
    except (ValueError, RecursionError) as error:
        raise SpliceError(str(error)) from error
    for each in skeleton.fields:
        yield _Field(json.loads(body[each.name_start : each.name_end]), each.name_start, each.start, each.end)


def _fields_of_text(text: str) -> Iterator[_Field]:
    """The fields of an object, up to its end and the text's."""
    try:
        at = _expect(text, 0, "{")
        if text[at] != "}":
            while True:
                name_start = at
                name, at = _decode(text, at)
                if not isinstance(name, str):
                    raise ValueError(f"a name expected at {at}")
                start = _expect(text, at, ":")
                _, end = _decode(text, start)
                yield _Field(name, name_start, start, end)
                at = _skip(text, end)
                if text[at] != ",":
                    break
                at = _skip(text, at + 1)
        if _expect(text, at, "}") != len(text):
            raise ValueError("something follows the object")
    except (ValueError, IndexError, RecursionError) as error:
        raise SpliceError(str(error)) from error


def _expect(text: str, at: int, character: str) -> int:
    """The place after a character that must come next, and after the white space that follows it."""
    at = _skip(text, at)
    if text[at] != character:
        raise ValueError(f"{character!r} expected at {at}")
    return _skip(text, at + 1)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at
