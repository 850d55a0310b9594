"""Bounds on the heads of a connection's requests: on their size, on how long they take, and on what they ask for.

httptools refuses what could be read in two ways: several lengths, a length beside a transfer coding, bare CR or LF.
Refused here besides: what `router.http.strict_requests` names.
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
    """A request that is not read any further. httptools makes a parser's error of it, which is answered with 400."""


class HeadLimiter:
    """Counts the bytes of the head that is read, and sets the connection's deadline for it.

    `reading`: a head is waited for or has come in part.
    """

    __slots__ = ("_deadline", "_size", "reading")

    def __init__(self, deadline: Deadline) -> None:
        self.reading = False
        self._size = 0
        self._deadline = deadline

    def begin(self) -> None:
        """A head is waited for, or its first bytes came."""
        if not self.reading:
            self.reading = True
            self._deadline.set(HEAD_SECONDS)
        self._size = 0

    def add(self, size: int) -> None:
        """The parser has read more of the head, or a trailer. Raises RefusedRequestError."""
        self._size += size
        if self._size > HEAD_BYTES:
            raise RefusedRequestError("the head is too large")

    def end(self) -> None:
        """The head is complete."""
        self.reading = False
        self._deadline.clear()

    @property
    def size(self) -> int:
        """How many bytes came of a head that is not complete; 0 between two heads."""
        return self._size if self.reading else 0

    def fits(self, before: int, came: int) -> bool:
        """Whether the head stays within its bound, when `came` bytes were read since its size was `before`.

        The parser keeps a header to itself until it is complete, so all bytes count that came with an unfinished head.
        """
        if not self.reading:
            return True
        self._size = before + came
        return self._size <= HEAD_BYTES


def check_head(target: bytes, version: str, headers: Headers) -> None:
    """Refuse what another parser might read in another way. Raises RefusedRequestError."""
    if problem := head_problem(target, version, headers):
        raise RefusedRequestError(problem)
