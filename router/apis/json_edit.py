"""Changing one field of a JSON object in its bytes: all others stay as they were sent.

Bytes are read as Latin-1, one character each: what JSON is made of is ASCII, so places in the text are places in the
bytes, and whatever a string holds comes out as it went in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

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
    found = [body[each.start : each.end] for each in _fields(body.decode("latin-1")) if each.name == name]
    return found[-1] if found else None


def with_field(body: bytes, name: str, value: bytes) -> bytes:
    """The object with this field, in place of any of that name. Raises SpliceError."""
    text = body.decode("latin-1")
    fields = list(_fields(text))
    places = [each for each in fields if each.name == name]
    for each in reversed(places):
        body = body[: each.start] + value + body[each.end :]
    if places:
        return body
    end = fields[-1].end if fields else text.index("{") + 1
    return body[:end] + (b"," if fields else b"") + json.dumps(name).encode() + b":" + value + body[end:]


def without_fields(body: bytes, names: Collection[str]) -> bytes:
    """The object without the fields of these names. Raises SpliceError."""
    text = body.decode("latin-1")
    kept = [text[each.name_start : each.end] for each in _fields(text) if each.name not in names]
    return b"{%b}" % ",".join(kept).encode("latin-1")


def _fields(text: str) -> Iterator[_Field]:
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
