"""Chunks of an event stream that need no parser: whole ones, of whole lines, as engines write events.

A chunk is its size in hexadecimal digits, CRLF, as many bytes, CRLF (RFC 9112, 7.1).
"""

from __future__ import annotations

from typing import Final

_LARGEST = 4096
# Sizes as most engines write them. A parser reads all else: extensions, leading zeros, the last chunk.
_SIZES: Final = {form % size: size for size in range(1, _LARGEST + 1) for form in (b"%x", b"%X")}
_LONGEST_LINE: Final = len(b"%x\r\n" % _LARGEST)
END: Final = b"\n\r\n"  # the end of the last line in a chunk, and the end of the chunk
LAST: Final = b"0\r\n\r\n"  # the chunk that ends a body without trailers


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
