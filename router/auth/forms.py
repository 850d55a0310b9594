"""Forms, which some routes take instead of JSON: read as engines read them, or refused.

RFC 7578 leaves much open, and RFC 2231 lets a field's name be written in pieces and encoded. So a form is accepted only
in the form that clients' libraries write: no preamble, one plain `Content-Disposition` for each part.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final
from urllib.parse import unquote_plus

from http_api.errors import RequestError

_MULTIPART: Final = re.compile(
    rb"multipart/form-data((?:\s*;\s*(?!boundary)[\w-]+=[\w.-]+)*)\s*;\s*boundary=(?:([\w'()+,./:=?-]{1,70})|"
    rb'"([\w\'()+,./:=? -]{1,69}[\w\'()+,./:=?-])")(?:\s*;\s*charset=[\w.-]+)?\s*',
    re.IGNORECASE | re.ASCII,
)
# A name, and a file's. A backslash is read in several ways.
_DISPOSITION: Final = re.compile(
    rb'form-data; *name=(?:"([^"\\\x00-\x1f]*)"|([\w.-]+))(?:; *filename=(?:"[^"\\\x00-\x1f]*"|[^\s;"\\]+))?'
    rb"(?:; *filename\*=[\w-]+'[\w-]*'[\w%.!#$&+^`|~-]+)?",
    re.IGNORECASE | re.ASCII,
)
_MOST_HEAD: Final = 4096  # bytes of a part's headers
_MOST_PARTS: Final = 1000
_STEP: Final = 2**20
# Bytes of what is decoded of a form in the way of pages.
_LONGEST_NAME: Final = 1024
_LONGEST_VALUE: Final = 64 * 1024
_URLENCODED: Final = b"application/x-www-form-urlencoded"
_SEPARATORS: Final = re.compile(rb"[&;]")


def form_fields(content_type: bytes, body: bytes, wanted: Collection[str] = ()) -> Iterator[tuple[str, bytes]] | None:
    """The names and values of a form's fields, files too; None for what is no form. Raises RequestError (400).

    Values may be encoded still, but for those of the `wanted` names. What is too long to be one of those has no name.
    """
    kind = content_type.strip().lower()
    if kind.startswith(b"multipart/"):
        read = _MULTIPART.fullmatch(content_type.strip())
        if read is None:
            raise _refusal("Its content-type is not multipart/form-data with one plain boundary")
        return _parts(read[2] or read[3], body)
    if kind.startswith(_URLENCODED):
        return _pairs(body, wanted)
    return None


def _parts(boundary: bytes, body: bytes) -> Iterator[tuple[str, bytes]]:
    delimiter = b"\r\n--" + boundary
    if not body.startswith(delimiter[2:]):
        raise _refusal("It does not begin with its boundary")
    place = len(delimiter) - 2
    for _ in range(_MOST_PARTS):
        if body.startswith(b"--", place):
            if body[place + 2 :].strip(b"\r\n"):
                raise _refusal("Something follows its last part")
            return
        head_end = body.find(b"\r\n\r\n", place, place + _MOST_HEAD)
        end = _find(body, delimiter, head_end + 2)
        if not body.startswith(b"\r\n", place) or head_end < 0 or end < 0:
            raise _refusal("One of its parts is not whole")
        yield _name(_between(body, place + 2, head_end)), _between(body, head_end + 4, end)
        place = end + len(delimiter)
    raise _refusal(f"It has more than {_MOST_PARTS} parts")


def _between(body: bytes, start: int, end: int) -> bytes:
    """`body[start:end]`. Compiled, a slice of bytes that ends before it begins is an error."""
    return body[start:end] if start < end else b""


def _find(body: bytes, delimiter: bytes, place: int) -> int:
    """As `bytes.find`, in steps, between which other threads run."""
    while place < len(body):
        found = body.find(delimiter, place, place + _STEP + len(delimiter))
        if found >= 0:
            return found
        place += _STEP
    return -1


def _name(head: bytes) -> str:
    names = []
    for line in head.split(b"\r\n"):
        key, colon, value = line.partition(b":")
        if not colon or not key or key.strip() != key or b"\r" in value or b"\n" in value:
            raise _refusal("One of its parts has a header that is none")
        if key.lower() == b"content-disposition":
            names.append(value.strip())
    read = _DISPOSITION.fullmatch(names[0]) if len(names) == 1 else None
    if read is None:
        raise _refusal("One of its parts has not one plain name")
    return (read[1] or read[2] or b"").decode(errors="replace")


def _pairs(body: bytes, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
    if body.count(b"&") + body.count(b";") >= _MOST_PARTS:
        raise _refusal(f"It has more than {_MOST_PARTS} parts")
    for pair in _SEPARATORS.split(body):
        raw, _, value = pair.partition(b"=")
        name = unquote_plus(raw.decode("latin-1")) if len(raw) <= _LONGEST_NAME else ""
        if name in wanted:
            if len(value) > _LONGEST_VALUE:
                raise _refusal(f"{name} is longer than {_LONGEST_VALUE} bytes")
            value = unquote_plus(value.decode("latin-1")).encode()
        yield name, value


def _refusal(problem: str) -> RequestError:
    return RequestError(f"The form is not accepted. {problem}. Write it as RFC 7578 says.", code="form")
