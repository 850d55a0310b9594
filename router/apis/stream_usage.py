"""Usage in streams, asked for on the client's behalf, and taken out of what the client sees.

Without it most streams would tell nothing of their cached tokens. A client that sends `stream_options` of its own is
left alone.
"""

from __future__ import annotations

import msgspec

from router.apis.json_edit import SpliceError, field, with_field
from router.http.headers import Headers

_PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
_LONGEST_EVENT = 2**20  # bytes; one that is longer is no usage


def asking_for_usage(path: str, body: bytes) -> bytes | None:
    """The body of a streamed request, asking for usage; None when it is no such request or asks already."""
    if path not in _PATHS:
        return None
    try:
        if field(body, "stream") != b"true" or field(body, "stream_options") not in (None, b"null"):
            return None
        return with_field(body, "stream_options", b'{"include_usage":true}')
    except SpliceError:
        return None  # it is refused elsewhere, in words


class HiddenUsage:
    """Takes the event of usage out of a stream's bytes as they pass."""

    def __init__(self) -> None:
        self._begun = b""  # an event whose end has not come

    @staticmethod
    def hides(headers: Headers) -> bool:
        """Whether an answer with these headers is a stream that can be changed."""
        known = dict(headers)
        is_events = known.get(b"content-type", b"").startswith(b"text/event-stream")
        return is_events and not {b"content-length", b"content-encoding"} & set(known)

    def lets_pass(self, chunks: bytes) -> bool:
        """Whether these whole chunks, as they are framed, are whole events and none of usage."""
        return not self._begun and chunks.find(b'"usage"') < 0 and chunks.endswith(b"\n\n\r\n")

    def passed(self, chunk: bytes, ended: bool) -> bytes:
        """What to pass on now that this came."""
        *events, self._begun = (self._begun + chunk).split(b"\n\n")
        passed = b"".join(event + b"\n\n" for event in events if not _is_usage(event))
        if ended or len(self._begun) > _LONGEST_EVENT:
            passed, self._begun = passed + self._begun, b""
        return passed


class _Event(msgspec.Struct):
    choices: list[msgspec.Raw]
    usage: dict[str, msgspec.Raw]


def _is_usage(event: bytes) -> bool:
    if b'"usage"' not in event or not event.lstrip().startswith(b"data:"):
        return False
    try:
        return not msgspec.json.decode(event.lstrip()[len(b"data:") :], type=_Event).choices
    except (msgspec.DecodeError, UnicodeError):
        return False
