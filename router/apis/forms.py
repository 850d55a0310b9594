"""Form bodies, which some routes accept instead of JSON: strict parsing, and edits of one field.

RFC 7578 leaves details open, and RFC 2231 allows a field's name to be split and encoded. The strict parser accepts only
what client libraries write: no preamble, and one plain `Content-Disposition` per part. Every other form is refused,
because the engine might parse it differently.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from email.message import Message
from typing import Final
from urllib.parse import unquote_plus

from http_api.errors import RequestError

_MULTIPART: Final = re.compile(
    rb"multipart/form-data((?:\s*;\s*(?!boundary)[\w-]+=[\w.-]+)*)\s*;\s*boundary=(?:([\w'()+,./:=?-]{1,70})|"
    rb'"([\w\'()+,./:=? -]{1,69}[\w\'()+,./:=?-])")(?:\s*;\s*charset=[\w.-]+)?\s*',
    re.IGNORECASE | re.ASCII,
)
# A field's name and a file's name. Backslashes are excluded, because parsers disagree about them.
_DISPOSITION: Final = re.compile(
    rb'form-data; *name=(?:"([^"\\\x00-\x1f]*)"|([\w.-]+))(?:; *filename=(?:"[^"\\\x00-\x1f]*"|[^\s;"\\]+))?'
    rb"(?:; *filename\*=[\w-]+'[\w-]*'[\w%.!#$&+^`|~-]+)?",
    re.IGNORECASE | re.ASCII,
)
_MOST_HEAD: Final = 4096  # bytes of a part's headers
_MOST_PARTS: Final = 1000
_STEP: Final = 2**20
# Limits for the names and values of a URL-encoded form, in bytes.
_LONGEST_NAME: Final = 1024
_LONGEST_VALUE: Final = 64 * 1024
_URLENCODED: Final = b"application/x-www-form-urlencoded"
_SEPARATORS: Final = re.compile(rb"[&;]")


def form_fields(content_type: bytes, body: bytes, wanted: Collection[str] = ()) -> Iterator[tuple[str, bytes]] | None:
    """Return a form's (name, value) pairs, with the values of `wanted` names decoded; None for another content type.

    A name that is too long to be a wanted one is returned as "". Raises RequestError (400) if the form is not plain.
    """
    kind = content_type.strip().lower()
    if kind.startswith(b"multipart/"):
        read = _MULTIPART.fullmatch(content_type.strip())
        if read is None:
            raise _refusal("Its content type is not multipart/form-data with one plain boundary")
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
            raise _refusal("One of its parts is incomplete")
        yield _name(_between(body, place + 2, head_end)), _between(body, head_end + 4, end)
        place = end + len(delimiter)
    raise _refusal(f"It has more than {_MOST_PARTS} parts")


def _between(body: bytes, start: int, end: int) -> bytes:
    """Return `body[start:end]`, and b"" if `end` is before `start`, which compiled code treats as an error."""
    return body[start:end] if start < end else b""


def _find(body: bytes, delimiter: bytes, place: int) -> int:
    """Find the delimiter in steps of `_STEP` bytes, so that other threads run between the steps."""
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
            raise _refusal("One of its parts has an invalid header")
        if key.lower() == b"content-disposition":
            names.append(value.strip())
    read = _DISPOSITION.fullmatch(names[0]) if len(names) == 1 else None
    if read is None:
        raise _refusal("One of its parts does not have exactly one plain name")
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
    return RequestError(f"The form is not accepted. {problem}. Encode it as described in RFC 7578.", code="form")


def boundary_of(body: bytes) -> str | None:
    """Return a form's content type, with the boundary of the body's first line; None if the body is not a form."""
    line = body[: body.find(b"\r\n", 0, _MOST_HEAD)] if body.startswith(b"--") else b""
    return f'multipart/form-data; boundary="{line[2:].decode("latin-1")}"' if len(line) > 2 else None


def form_field(content_type: str, body: bytes, name: str) -> str | None:
    """Return the text of the first field of this name; None if the form has no field of this name."""
    place = _place_of(content_type, body, name)
    return None if place is None else body[place].decode(errors="replace")


def with_form_field(content_type: str, body: bytes, name: str, value: str) -> bytes:
    """Return the form with `value` in the first field of this name; unchanged if there is no field of this name."""
    place = _place_of(content_type, body, name)
    return body if place is None else body[: place.start] + value.encode() + body[place.stop :]


def _place_of(content_type: str, body: bytes, name: str) -> slice | None:
    declared = Message()
    declared["content-type"] = content_type
    boundary = declared.get_boundary()
    if declared.get_content_type() != "multipart/form-data" or not boundary:
        return None
    delimiter = b"--" + boundary.encode("latin-1", "replace")
    start = body.find(delimiter)
    for _ in range(_MOST_PARTS):
        if start < 0:
            break
        start += len(delimiter)
        head_end = body.find(b"\r\n\r\n", start, start + _MOST_HEAD)
        end = body.find(b"\r\n" + delimiter, start)
        if head_end >= 0 and head_end < end <= head_end + _MOST_HEAD and _is_field(body[start:head_end], name):
            return slice(head_end + 4, end)
        start = end + 2 if end >= 0 else -1
    return None


def _is_field(head: bytes, name: str) -> bool:
    for line in head.decode(errors="replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            disposition = Message()
            disposition["content-disposition"] = value.strip()
            return disposition.get_param("name", header="content-disposition") == name
    return False
