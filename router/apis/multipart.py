"""One field of a `multipart/form-data` body, found without copying the files beside it."""

from __future__ import annotations

from email.message import Message

# Headers of a part, and a value, that are longer than this are not read.
_LONGEST = 4096
# And no more parts.
_MOST_PARTS = 1000


def boundary_of(body: bytes) -> str | None:
    """The content type of a form, as its first line has the boundary; None of a body that is no form."""
    line = body[: body.find(b"\r\n", 0, _LONGEST)] if body.startswith(b"--") else b""
    return f'multipart/form-data; boundary="{line[2:].decode("latin-1")}"' if len(line) > 2 else None


def form_field(content_type: str, body: bytes, name: str) -> str | None:
    """The text of the first field of this name; None where there is none."""
    place = _place_of(content_type, body, name)
    return None if place is None else body[place].decode(errors="replace")


def with_form_field(content_type: str, body: bytes, name: str, value: str) -> bytes:
    """The form with this text in the first field of this name, if it has one."""
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
        head_end = body.find(b"\r\n\r\n", start, start + _LONGEST)
        end = body.find(b"\r\n" + delimiter, start)
        if head_end >= 0 and head_end < end <= head_end + _LONGEST and _named(body[start:head_end], name):
            return slice(head_end + 4, end)
        start = end + 2 if end >= 0 else -1
    return None


def _named(head: bytes, name: str) -> bool:
    """Whether a part's headers say that it is the field of this name, and no file."""
    for line in head.decode(errors="replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            disposition = Message()
            disposition["content-disposition"] = value.strip()
            return disposition.get_param("name", header="content-disposition") == name
    return False
