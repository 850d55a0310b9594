"""Headers as lists of pairs, and as the lines in which they are sent."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from typing import Final, TypeAlias

Header: TypeAlias = tuple[bytes, bytes]
# Names are in lower case.
Headers: TypeAlias = list[Header]
HeaderItems: TypeAlias = Iterable[Header]

# RFC 9110, 7.6.1: these are about one connection, not about the message.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
_NOT_FORWARDED: Final = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-kvrouter-explain"}
# To which of its ranks a request is sent: vLLM and SGLang read it.
RANK_HEADER: Final = b"x-data-parallel-rank"
_LONGEST_LENGTH: Final = 18  # digits
_NAMING_NOTHING = frozenset((b"keep-alive", b"close"))


def length_of(value: bytes) -> int:
    """What a `content-length` says, in bytes; 0 for what is no length, and very much for one that cannot be."""
    if not value.isdigit():
        return 0
    return int(value) if len(value) <= _LONGEST_LENGTH else sys.maxsize


def number_of(value: bytes) -> float | None:
    """A number from 0 on that a header says; None for anything else."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def forwarded_lines(headers: Headers) -> bytes:
    """The headers that are about the message, as they are sent."""
    return lines_of(end_to_end(headers, _NOT_FORWARDED))


def lines_of(headers: Headers) -> bytes:
    """Headers as they are sent."""
    return b"".join([b"%b: %b\r\n" % header for header in headers])


def end_to_end(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """The headers but those that are dropped, and those that a `connection` header names."""
    naming = [value for name, value in headers if name == b"connection" and value.lower() not in _NAMING_NOTHING]
    if naming:
        dropped |= {part.strip().lower() for part in b",".join(naming).split(b",")}
    return [header for header in headers if header[0] not in dropped]
