"""Heads that were read before: over one connection the same head comes again and again, but for the body's length."""

from __future__ import annotations

import re
from typing import Generic, TypeVar

T = TypeVar("T")

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})(?=\r\n)", re.IGNORECASE)
_END = b"\r\n\r\n"


class KnownHead(Generic[T]):
    """The bytes before and after the one length that a head tells, and what the parser `said` of such a head.

    The parser reads the same bytes in the same way, from the beginning of a message. So they need not be parsed again.
    """

    __slots__ = ("_after", "_before", "said")

    def __init__(self, before: bytes, after: bytes, said: T) -> None:
        self._before = before
        self._after = after
        self.said = said

    @classmethod
    def of(cls, data: bytes, said: T) -> KnownHead[T] | None:
        """That of a message which is all of `data`, and was parsed; None when it is no such message."""
        end = data.find(_END) + len(_END)
        lengths = list(_LENGTH.finditer(data, 0, end))
        if len(lengths) != 1 or int(lengths[0][1]) != len(data) - end:
            return None
        return cls(data[: lengths[0].start(1)], data[lengths[0].end(1) : end], said)

    def read(self, data: bytes) -> bytes | None:
        """The message's body, when `data` is a message with this head; None when the parser has to look."""
        before, after = self._before, self._after
        if not data.startswith(before):
            return None
        start = len(before)
        end = data.find(b"\r", start, start + 16)
        if end < 0 or not data.startswith(after, end):
            return None
        length, body = data[start:end], data[end + len(after) :]
        return body if length.isdigit() and int(length) == len(body) else None
