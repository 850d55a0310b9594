"""One field of a `multipart/form-data` body, found without copying the files beside it."""

from __future__ import annotations

from email.message import Message

# Headers of a part, and a value, that are longer than this are not read.
_LONGEST = 4096


def form_field(content_type: str, body: bytes, name: str) -> str | None:
    """The text of the first field of this name; None where there is none."""
    declared = Message()
    declared["content-type"] = content_type
    boundary = declared.get_boundary()
    if declared.get_content_type() != "multipart/form-data" or not boundary:
        return None
    delimiter = b"--" + boundary.encode("latin-1", "replace")
    start = body.find(delimiter)
    while start >= 0:
        start += len(delimiter)
        head_end = body.find(b"\r\n\r\n", start, start + _LONGEST)
        end = body.find(b"\r\n" + delimiter, start)
        if head_end >= 0 and head_end < end <= head_end + _LONGEST and _named(body[start:head_end], name):
            return body[head_end + 4 : end].decode(errors="replace")
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
