"""Bytes that need no parser: heads that were parsed before, and whole chunks of an event stream.

Most heads differ from earlier ones only in the body's length and a worker's date. A chunk is its size in hexadecimal
digits, CRLF, as many bytes, CRLF (RFC 9112, 7.1). Chunks of whole lines, as engines write events, are recognized.
"""

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
# Cached heads of other clients that are compared with the first message of a connection.
_RECENT: Final = 4
_LARGEST = 4096
# Sizes as most engines write them. A parser reads all else: extensions, leading zeros, the last chunk.
_SIZES: Final = {form % size: size for size in range(1, _LARGEST + 1) for form in (b"%x", b"%X")}
_LONGEST_LINE: Final = len(b"%x\r\n" % _LARGEST)
END: Final = b"\n\r\n"  # the end of the last line in a chunk, and the end of the chunk
LAST: Final = b"0\r\n\r\n"  # the chunk that ends a body without trailers


def head_size(data: bytes) -> int:
    """Return the size of a message's head in bytes. The head must be complete."""
    return data.find(_END) + len(_END)


class HeadPrefix:
    """The bytes of a message before its length's value. `dated`: the value of a `date` header in them may differ."""

    __slots__ = ("_date_at", "seen", "size")

    def __init__(self, seen: bytes, dated: bool = False) -> None:
        self.seen = seen
        self.size = len(seen)
        dates = [found.start(1) for found in _DATE.finditer(seen)] if dated else []
        self._date_at = dates[0] if len(dates) == 1 else -1

    def of(self, data: bytes) -> bool:
        """Return whether `data` begins with these bytes."""
        return data[: self.size] == self.seen or (self._date_at >= 0 and self._of_another_date(data))

    def _of_another_date(self, data: bytes) -> bool:
        seen, start, size = self.seen, self._date_at, self.size
        end = start + _DATE_BYTES
        if data[:start] != seen[:start] or data[end:size] != seen[end:]:
            return False
        date = data[start:end]
        if date.find(b"\r") >= 0 or date.find(b"\n") >= 0:
            return False  # the date's place has the end of a line
        self.seen = data[:size]
        return True


class CachedHead(Generic[T]):
    """A head of which all bytes but its length's digits are known, and its parsed form `parsed`."""

    __slots__ = ("_after", "_before", "parsed")

    def __init__(self, before: HeadPrefix, after: bytes, parsed: T) -> None:
        self._before = before
        self._after = after
        self.parsed = parsed

    @classmethod
    def of(cls, data: bytes, parsed: T, dated: bool = False) -> CachedHead[T] | None:
        """Return the head of one whole message with one length, if it is one. `dated`: a later date may differ."""
        end = head_size(data)
        lengths = list(_LENGTH.finditer(data, 0, end))
        if len(lengths) != 1 or int(lengths[0][1]) != len(data) - end:
            return None
        return cls(HeadPrefix(data[: lengths[0].start(1)], dated), data[lengths[0].end(1) : end], parsed)

    def read(self, data: bytes) -> bytes | None:
        """Return the body of a message with this head; None if the message must be parsed."""
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
        """Return whether both heads have the same bytes."""
        return self._before.seen == other._before.seen and self._after == other._after


class RecentHeads(Generic[T]):
    """The latest heads of all connections. Clients of one kind often send equal heads."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: list[CachedHead[T]] = []  # the latest first

    def read(self, data: bytes) -> tuple[CachedHead[T], bytes] | None:
        """Return a message's cached head and its body; None if its head is not cached."""
        for known in self._heads:
            body = known.read(data)
            if body is not None:
                return known, body
        return None

    def add(self, head: CachedHead[T]) -> CachedHead[T]:
        """Keep a head. Return the cached head with the same bytes, if there is one, else this head."""
        for known in self._heads:
            if known.same(head):
                return known
        self._heads.insert(0, head)
        del self._heads[_RECENT:]
        return head


def _lines_by_length() -> list[bytes]:
    lines = [b"%x\r\n" % size for size in range(1, _LARGEST + 1)]
    of_length = {len(line) + size + 2: line for size, line in enumerate(lines, 1)}
    return [of_length.get(length, b"") for length in range(max(of_length) + 1)]


# The size line of a chunk by the length of the whole chunk; empty if no chunk has that length.
_LINES: Final[list[bytes]] = _lines_by_length()


def body_size(data: bytes) -> int:
    """Return the number of body bytes in whole chunks of whole lines; 0 if `data` may be anything else."""
    length = len(data)
    if length < len(_LINES):
        line = _LINES[length]
        written = len(line)
        if written and data[:written] == line and data[length - 3 :] == END:
            return length - written - 2
    return _size_of_many(data)


def _size_of_many(data: bytes) -> int:
    total = place = 0
    while place < len(data):
        end = data.find(b"\r\n", place, place + _LONGEST_LINE)
        size = _SIZES.get(data[place:end], 0) if end > 0 else 0
        if not size:
            return 0
        place = end + size + 4
        if data[place - 3 : place] != END:
            return 0
        total += size
    return total
