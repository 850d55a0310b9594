"""Limits of a request's head: its size, its duration, and its form.

httptools refuses ambiguous heads: several lengths, a length beside a transfer coding, bare CR or LF. The rules of
`router.http.strict_requests` come on top.
"""

from __future__ import annotations

from typing import Final

from router.http.event_loop import Deadline
from router.http.headers import Headers
from router.http.strict_requests import head_problem

HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
TOO_LARGE: Final = "Request header fields too large."


class RefusedRequestError(Exception):
    """A request that is refused with status 400. httptools turns it into a parser's error."""


class HeadLimiter:
    """Counts the bytes of the current head, and sets the connection's deadline for it.

    `reading`: a head is awaited or incomplete.
    """

    __slots__ = ("_deadline", "_size", "reading")

    def __init__(self, deadline: Deadline) -> None:
        self.reading = False
        self._size = 0
        self._deadline = deadline

    def begin(self) -> None:
        """Await a head, or count from its first bytes."""
        if not self.reading:
            self.reading = True
            self._deadline.set(HEAD_SECONDS)
        self._size = 0

    def add(self, size: int) -> None:
        """Count `size` parsed bytes of the head, or of a trailer. Raises RefusedRequestError."""
        self._size += size
        if self._size > HEAD_BYTES:
            raise RefusedRequestError("the head is too large")

    def end(self) -> None:
        """End the head: it is complete."""
        self.reading = False
        self._deadline.clear()

    @property
    def size(self) -> int:
        """The number of bytes of an incomplete head; 0 between two heads."""
        return self._size if self.reading else 0

    def fits(self, before: int, came: int) -> bool:
        """Return whether an incomplete head is within its limit.

        The parser reports a header only when it is complete. So all received bytes count:

        - `before`: the size of the head before these bytes.
        - `came`: the number of received bytes.
        """
        if not self.reading:
            return True
        self._size = before + came
        return self._size <= HEAD_BYTES


def check_head(target: bytes, version: str, headers: Headers) -> None:
    """Raise RefusedRequestError for a head that another parser could read differently."""
    if problem := head_problem(target, version, headers):
        raise RefusedRequestError(problem)
