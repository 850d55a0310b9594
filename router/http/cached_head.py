"""Heads that were read before: the same head comes again and again, but for the body's length, and a worker's date."""

from __future__ import annotations

import re
from typing import Final, Generic, TypeVar

T = TypeVar("T")

_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]{1,15})(?=\r\n)", re.IGNORECASE)
_DATE = re.compile(rb"\r\ndate:[ \t]*([^\r\n]{29})(?=\r\n)", re.IGNORECASE)
_DATE_BYTES: Final = 29  # RFC 9110, 5.6.7
_END = b"\r\n\r\n"
_LONGEST: Final = 15  # digits
_ZERO: Final = 48  # b"0"
# How many heads of different clients are tried for one that speaks for the first time.
_RECENT: Final = 4


def head_size(data: bytes) -> int:
    """How many bytes the head takes of a message that has all of it."""
    return data.find(_END) + len(_END)


class HeadPrefix:
    """Bytes that messages begin with; `dated`: with whatever date, where they have a header of it.

    `seen`: as they came the last time.
    """

    __slots__ = ("_date_at", "seen", "size")

    def __init__(self, seen: bytes, dated: bool = False) -> None:
        self.seen = seen
        self.size = len(seen)
        dates = [found.start(1) for found in _DATE.finditer(seen)] if dated else []
        self._date_at = dates[0] if len(dates) == 1 else -1

    def of(self, data: bytes) -> bool:
        """Whether `data` begins so."""
        return data[: self.size] == self.seen or (self._date_at >= 0 and self._of_another_date(data))

    def _of_another_date(self, data: bytes) -> bool:
        seen, start, size = self.seen, self._date_at, self.size
        end = start + _DATE_BYTES
        if data[:start] != seen[:start] or data[end:size] != seen[end:]:
            return False
        date = data[start:end]
        if date.find(b"\r") >= 0 or date.find(b"\n") >= 0:
            return False  # it is another header in part
        self.seen = data[:size]
        return True


class CachedHead(Generic[T]):
    """The bytes before and after the one length that a head tells, and what the parser `said` of such a head.

    The parser reads the same bytes in the same way, from the beginning of a message. So they need not be parsed again.
    """

    __slots__ = ("_after", "_before", "said")

    def __init__(self, before: HeadPrefix, after: bytes, said: T) -> None:
        self._before = before
        self._after = after
        self.said = said

    @classmethod
    def of(cls, data: bytes, said: T, dated: bool = False) -> CachedHead[T] | None:
        """That of a message which is all of `data`, and was parsed; None when it is no such message.

        `dated`: whatever date stands before the length.
        """
        end = head_size(data)
        lengths = list(_LENGTH.finditer(data, 0, end))
        if len(lengths) != 1 or int(lengths[0][1]) != len(data) - end:
            return None
        return cls(HeadPrefix(data[: lengths[0].start(1)], dated), data[lengths[0].end(1) : end], said)

    def read(self, data: bytes) -> bytes | None:
        """The message's body, when `data` is a message with this head; None when the parser has to look."""
        before, after = self._before, self._after
        if not before.of(data):
            return None
        start = before.size
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

    def same(self, other: CachedHead[T]) -> bool:
        """Whether they know the same bytes."""
        return self._before.seen == other._before.seen and self._after == other._after


class RecentHeads(Generic[T]):
    """The heads that clients sent last, over whatever connection: those of one kind of client are often the same."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: list[CachedHead[T]] = []  # the latest first

    def read(self, data: bytes) -> tuple[CachedHead[T], bytes] | None:
        """The head of a message and its body; None when the head is none of these."""
        for known in self._heads:
            body = known.read(data)
            if body is not None:
                return known, body
        return None

    def add(self, head: CachedHead[T]) -> CachedHead[T]:
        """Remember a head. The one to go on with: that which was known already, if it was."""
        for known in self._heads:
            if known.same(head):
                return known
        self._heads.insert(0, head)
        del self._heads[_RECENT:]
        return head
