"""The beginning of a stream: whether it is an error, although the head of the stream was sent with status 200.

Engines send a stream's head before they check or schedule its request, and some also events that announce the answer.
Until the first event with content, an error is a refusal or a failure like a status.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from kvevents.decoding import json_reader
from router.http.compression import Decompressor

_LONGEST: Final = 65_536  # bytes of events without content
_CONTENT: Final = 0
# The types of errors by the status that their engines mean.
_STATUS_OF_TYPE: Final = (
    ("unavailable", 503),
    ("overloaded", 503),
    ("rate_limit", 429),
    ("not_found", 404),
    ("notfound", 404),
    ("badrequest", 400),
    ("bad_request", 400),
    ("invalid", 400),
)
_ANNOUNCEMENTS: Final = frozenset(
    ("message_start", "ping", "response.created", "response.queued", "response.in_progress")
)

_decode = json_reader(dict[str, Any])


class StreamBeginning:
    """The bytes of a stream until its first event with content or with an error. Each byte is searched once.

    - `received`: the bytes as the worker sent them.
    - `plain`: the same, decompressed.
    """

    __slots__ = ("_decompressor", "_event", "_held", "_searched", "plain", "received")

    def __init__(self, compressed: bool = False) -> None:
        self._decompressor = Decompressor() if compressed else None
        self.received = bytearray()
        self.plain = bytearray() if compressed else self.received
        self._event = bytearray()  # the incomplete event, with line feeds as the ends of lines
        self._searched = 0  # no event ends among this number of its bytes
        self._held = b""  # a carriage return, until the next byte is known

    def add(self, data: bytes, ended: bool = False) -> int | None:
        """Add received bytes; `ended`: they are the last ones.

        Returns the status of the error that the stream begins with; 0 if it begins with content; None if it is unknown
        yet. The status is 400 for a refusal without a status, and 500 for any other error without one.
        """
        self.received += data
        if self._decompressor is not None:
            data = self._decompressor.read(data)
            self.plain += data
        if max(len(self.received), len(self.plain)) > _LONGEST:
            return _CONTENT
        data = self._held + data
        self._held = b"\r" if data.endswith(b"\r") and not ended else b""
        self._event += data.removesuffix(self._held).replace(b"\r\n", b"\n")
        while (end := self._event.find(b"\n\n", self._searched)) >= 0:
            status = _event_status(bytes(self._event[:end]))
            del self._event[: end + 2]
            self._searched = 0
            if status is not None:
                return status
        self._searched = max(len(self._event) - 1, 0)
        return _event_status(bytes(self._event)) if ended else None


def stream_error(beginning: bytes) -> int | None:
    """Return the status of the error in the beginning of a stream; None if it is no error, or incomplete."""
    return StreamBeginning().add(beginning) or None


def is_refusal(status: int) -> bool:
    """Return whether the status of a stream's error says that the request is at fault, and not the engine."""
    return status < 500


def _event_status(event: bytes) -> int | None:
    """Return the status of an event's error; 0 if it has content; None if it only announces the answer."""
    data = b"\n".join(line[len(b"data:") :] for line in event.splitlines() if line.startswith(b"data:"))
    if not data:
        return None
    try:
        found = _decode(data)
    except msgspec.DecodeError:
        return _CONTENT
    kind = found.get("type")
    if kind == "response.failed" and isinstance(found.get("response"), dict):
        found = found["response"]
    if error := found.get("error"):
        return _error_status(error)
    if kind == "error":
        return _error_status(found)
    return None if kind in _ANNOUNCEMENTS or _is_empty(found.get("choices")) else _CONTENT


def _error_status(error: object) -> int:
    fields = error if isinstance(error, dict) else {}
    for name in ("code", "status_code", "status"):
        status = fields.get(name)
        if isinstance(status, str) and status.isascii() and status.isdigit() and len(status) == 3:
            status = int(status)
        if type(status) is int and 400 <= status < 600:
            return status
    kind = f"{fields.get('type', '')} {fields.get('code', '')}".lower()
    return next((status for name, status in _STATUS_OF_TYPE if name in kind), 500)


def _is_empty(choices: object) -> bool:
    """Return whether the choices of a chat's event have no content, such as those that only name the role."""
    if not isinstance(choices, list) or not choices:
        return False
    for choice in choices:
        delta = choice.get("delta") if isinstance(choice, dict) else None
        if not isinstance(delta, dict) or choice.get("finish_reason") is not None:
            return False
        if any(value for name, value in delta.items() if name != "role"):
            return False
    return True
