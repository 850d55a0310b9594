"""Every request has an id: the client's `x-request-id`, or one made here. It is forwarded, returned and logged."""

from __future__ import annotations

import os
import re
from typing import Final

from router.http.headers import Headers

HEADER = b"x-request-id"
_USABLE = re.compile(rb"[!-~]{1,128}")  # what may stand in a log line and in a header
_DIGITS: Final = 32
_AT_ONCE: Final = 64


class _Ids:
    """Ids that are made beforehand: one question to the system for many."""

    def __init__(self) -> None:
        self._digits = b""
        self._place = 0

    def next(self) -> bytes:
        if self._place >= len(self._digits):
            self._digits = os.urandom(_DIGITS // 2 * _AT_ONCE).hex().encode()
            self._place = 0
        start = self._place
        self._place = start + _DIGITS
        return self._digits[start : start + _DIGITS]


_ids: Final = _Ids()


def given_id(headers: Headers) -> bytes | None:
    """The id that a client gave its request, if it is usable; names are in lower case."""
    given = [value for name, value in headers if name == HEADER]
    return given[0] if len(given) == 1 and _USABLE.fullmatch(given[0]) else None


def new_id() -> bytes:
    """An id for a request without one."""
    return _ids.next()


def with_id(headers: Headers, request_id: bytes) -> Headers:
    """The headers, whose names are in lower case, with this id and no other."""
    kept = [header for header in headers if header[0] != HEADER]
    kept.append((HEADER, request_id))
    return kept
