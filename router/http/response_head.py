"""The head of a worker's answer, and what of it goes on to the client."""

from __future__ import annotations

from typing import Final

from router.http.headers import HOP_BY_HOP, Headers, end_to_end, lines_of
from router.http.request_id import HEADER as REQUEST_ID

LENGTH = b"content-length"
WITHOUT_BODY: Final = (204, 304)
_EVENT_STREAM = b"text/event-stream"
# Who answers the client says these itself.
_OUR_OWN = HOP_BY_HOP | {b"date", b"server", REQUEST_ID}
_WITHOUT_LENGTH = _OUR_OWN | {LENGTH}
_OUR_PREFIX = b"x-kvrouter-"


class ResponseHead:
    """A head; names are in lower case. `is_stream`: of events. `length`: what it says of the body's, empty if nothing.

    `passed_on`: the headers that are about the message, not about the connection or who answers. A body that does not
    follow, whatever the worker says, has no length.
    """

    __slots__ = ("_beginning", "_lines", "_made_with", "headers", "is_stream", "length", "passed_on", "status")

    def __init__(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self.length = b"" if status in WITHOUT_BODY else self.first(LENGTH)
        self.is_stream = self.first(b"content-type").startswith(_EVENT_STREAM)
        dropped = _WITHOUT_LENGTH if status in WITHOUT_BODY else _OUR_OWN
        self.passed_on = [header for header in end_to_end(headers, dropped) if not _is_ours(header[0])]
        self._lines: bytes | None = None
        self._beginning = self._made_with = b""

    def first(self, name: bytes) -> bytes:
        """The first value of a header; empty when there is none."""
        for known, value in self.headers:
            if known == name:
                return value
        return b""

    @property
    def lines(self) -> bytes:
        """What is passed on, but for the length, as it is sent. The same head may come again and again."""
        lines = self._lines
        if lines is None:
            lines = self._lines = lines_of([header for header in self.passed_on if header[0] != LENGTH])
        return lines

    def beginning(self, before: bytes) -> bytes:
        """`lines` after these, which are mostly the same."""
        if before is not self._made_with:
            self._made_with = before
            self._beginning = before + self.lines
        return self._beginning

    def without_length(self) -> ResponseHead:
        """The same of any body that came at once."""
        return ResponseHead(self.status, [header for header in self.headers if header[0] != LENGTH])


def _is_ours(name: bytes) -> bool:
    """Whether it is a name of ours, or would be taken for one: many programs know no `_` from `-`."""
    if b"_" in name:
        name = name.replace(b"_", b"-")
        return name.startswith(_OUR_PREFIX) or name == REQUEST_ID
    return name.startswith(_OUR_PREFIX)
