"""Heads that were read before: the same head comes again and again, but for the body's length."""

from __future__ import annotations

import re
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})(?=\r\n)", re.IGNORECASE)
_END = b"\r\n\r\n"
_LONGEST: Final = 15  # digits
_ZERO: Final = 48  # b"0"
# How many heads of different clients are tried for one that speaks for the first time.
_RECENT: Final = 4


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
        start = len(before)
        if data[:start] != before:
            return None
        most = min(start + _LONGEST, len(data))
        length, end = 0, start
        while end < most:
            digit = data[end] - _ZERO
            if digit < 0 or digit > 9:
                break
            length = length * 10 + digit
            end += 1
        body = end + len(after)
        if end == start or len(data) - body != length or data[end:body] != after:
            return None
        return data[body:]

    def same(self, other: KnownHead[T]) -> bool:
        """Whether they know the same bytes."""
        return self._before == other._before and self._after == other._after


class RecentHeads(Generic[T]):
    """The heads that clients sent last, over whatever connection: those of one kind of client are often the same."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: list[KnownHead[T]] = []  # the latest first

    def known_of(self, data: bytes) -> KnownHead[T] | None:
        """The head that a message begins with; None when it is none of these."""
        for known in self._heads:
            if known.read(data) is not None:
                return known
        return None

    def add(self, head: KnownHead[T]) -> KnownHead[T]:
        """Remember a head. The one to go on with: that which was known already, if it was."""
        for known in self._heads:
            if known.same(head):
                return known
        self._heads.insert(0, head)
        del self._heads[_RECENT:]
        return head
