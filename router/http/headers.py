"""Headers of HTTP messages: as pairs, as lines, those that the router reads, adds or drops, and those of CORS."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Collection, Iterable
from typing import Final, TypeAlias

Header: TypeAlias = tuple[bytes, bytes]
# Names are in lower case.
Headers: TypeAlias = list[Header]
HeaderItems: TypeAlias = Iterable[Header]

# RFC 9110, 7.6.1: headers about one connection, not about the message.
HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
# RFC 9110, 5.6.2: the characters of a header's name.
TOKEN: Final = b"!#$%&'*+-.^_`|~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NOT_FORWARDED: Final = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"x-kvrouter-explain"}
# The DP rank that a request is for; vLLM and SGLang read it.
RANK_HEADER: Final = b"x-data-parallel-rank"
# Workers are asked for uncompressed answers, because the router reads ids and usage in them.
UNCOMPRESSED: Final = (b"accept-encoding", b"identity")
_LONGEST_LENGTH: Final = 18  # digits
_NAMING_NOTHING = frozenset((b"keep-alive", b"close"))
# RFC 9110, 5.5: what values have nowhere, and what a value does not begin or end with.
_LOWER_CASE_TOKEN: Final = TOKEN.translate(None, b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_NOT_IN_VALUES: Final = re.compile(rb"[\0\r]|\A[ \t]|\n[ \t]|[ \t]\n|[ \t]\Z")
REQUEST_ID = b"x-request-id"
_USABLE = re.compile(rb"[!-~]{1,128}")  # safe in a log line and in a header
_DIGITS: Final = 32
_AT_ONCE: Final = 64
LENGTH = b"content-length"
WITHOUT_BODY: Final = (204, 304)
_EVENT_STREAM = b"text/event-stream"
# The router writes these itself.
_OUR_OWN = HOP_BY_HOP | {b"date", b"server", REQUEST_ID}
_WITHOUT_LENGTH = _OUR_OWN | {LENGTH}
_OUR_PREFIX = b"x-kvrouter-"
# Content-encodings of gzip and zlib.
_DECOMPRESSED: Final = frozenset(("gzip", "x-gzip", "deflate"))
_ANY: Final = "*"
# Headers of `Cors.lines`, and one that would allow credentials.
_OVERRIDDEN: Final = frozenset(
    (b"access-control-allow-origin", b"access-control-expose-headers", b"access-control-allow-credentials")
)
_MAX_AGE_SECONDS: Final = 600
# Response headers beside the simple ones that a page may read.
_EXPOSED: Final = (
    b"x-request-id, x-kvrouter-worker, x-kvrouter-overlap-tokens, x-kvrouter-loadable-tokens, x-kvrouter-attempts, "
    b"x-kvrouter-waited-ms, retry-after"
)


def length_of(value: bytes) -> int:
    """Return the bytes that a `content-length` announces: 0 if invalid, the largest number if too long."""
    return whole_number(value) or 0


def whole_number(value: bytes) -> int | None:
    """Return ASCII digits as a number, the largest one if they are too many; None if they are no digits."""
    if not value.isdigit():
        return None
    return int(value) if len(value) <= _LONGEST_LENGTH else sys.maxsize


def number_of(value: bytes) -> float | None:
    """Return a header's value as a number of at least 0; None if it is anything else."""
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None


def forwarded_lines(headers: Headers) -> bytes:
    """Return the lines of the headers that are about the message."""
    return lines_of(end_to_end(headers, _NOT_FORWARDED))


def is_token(name: bytes) -> bool:
    """Return whether bytes are a token of RFC 9110, as names of headers and methods are."""
    return bool(name) and not name.translate(None, TOKEN)


def are_headers(headers: Headers) -> bool:
    """Return whether all names are tokens in lower case, and all values are part of one line without outer spaces."""
    names = [name for name, _ in headers]
    if b"".join(names).translate(None, _LOWER_CASE_TOKEN) or b"" in names:
        return False
    values = b"\n".join([value for _, value in headers])
    return values.count(b"\n") == max(len(headers) - 1, 0) and _NOT_IN_VALUES.search(values) is None


def lines_of(headers: Headers) -> bytes:
    """Return one line of HTTP/1.1 for each header. Raises ValueError if one would not be exactly one line."""
    lines = b"".join([b"%b: %b\r\n" % header for header in headers])
    count = len(headers)
    if lines.count(b"\n") != count or lines.count(b"\r") != count or b"\0" in lines:
        raise ValueError("a header has a line end or NUL")
    names = [name for name, _ in headers]
    if b"" in names or b"".join(names).translate(None, TOKEN):
        raise ValueError("a header's name is no token")
    return lines


def end_to_end(headers: Headers, dropped: frozenset[bytes]) -> Headers:
    """Return the headers without those in `dropped` and those that a `connection` header names."""
    naming = [value for name, value in headers if name == b"connection" and value.lower() not in _NAMING_NOTHING]
    if naming:
        dropped |= {part.strip().lower() for part in b",".join(naming).split(b",")}
    return [header for header in headers if header[0] not in dropped]


def asking_uncompressed(headers: Headers) -> Headers:
    """Return the headers with a request for an uncompressed answer in place of the codings that the client accepts."""
    name, _ = UNCOMPRESSED
    return [UNCOMPRESSED if header[0] == name else header for header in headers]


class _Ids:
    """Request ids, created in advance: one system call yields random bytes for many."""

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
    """Return the id that a client gave its request; None without a usable one. Names are in lower case."""
    given = [value for name, value in headers if name == REQUEST_ID]
    return given[0] if len(given) == 1 and _USABLE.fullmatch(given[0]) else None


def new_id() -> bytes:
    """Return an id for a request without one."""
    return _ids.next()


def with_id(headers: Headers, request_id: bytes) -> Headers:
    """Return the headers, whose names are in lower case, with this id and no other."""
    kept = [header for header in headers if header[0] != REQUEST_ID]
    kept.append((REQUEST_ID, request_id))
    return kept


class ResponseHead:
    """The head of a response.

    - `length`: the value of `content-length`; empty without one, and for a status without a body.
    - `passed_on`: the headers that are about the message.
    - `closes`: the worker closes its connection after the response.
    - `compressed`: whether `router.http.compression` can decompress the body.
    """

    __slots__ = (
        "_beginning",
        "_lines",
        "_made_with",
        "closes",
        "compressed",
        "headers",
        "is_stream",
        "length",
        "passed_on",
        "status",
    )

    def __init__(self, status: int, headers: Headers, closes: bool = False) -> None:
        self.status = status
        self.headers = headers
        self.closes = closes
        self.length = b"" if status in WITHOUT_BODY else self.first(LENGTH)
        self.is_stream = self.first(b"content-type").startswith(_EVENT_STREAM)
        dropped = _WITHOUT_LENGTH if status in WITHOUT_BODY else _OUR_OWN
        self.passed_on = [header for header in end_to_end(headers, dropped) if not _is_ours(header[0])]
        encodings = [value.decode("latin-1") for name, value in headers if name == b"content-encoding"]
        self.compressed = any(is_decompressed(encoding) for encoding in encodings)
        self._lines: bytes | None = None
        self._beginning = self._made_with = b""

    def first(self, name: bytes) -> bytes:
        """Return the first value of a header; empty if the head does not have it."""
        for known, value in self.headers:
            if known == name:
                return value
        return b""

    @property
    def lines(self) -> bytes:
        """The lines of the headers that are passed on, without the length. They are kept, as heads repeat."""
        lines = self._lines
        if lines is None:
            lines = self._lines = lines_of([header for header in self.passed_on if header[0] != LENGTH])
        return lines

    def beginning(self, before: bytes) -> bytes:
        """Return the lines `before`, followed by this head's. The result is kept, as `before` seldom changes."""
        if before is not self._made_with:
            self._made_with = before
            self._beginning = before + self.lines
        return self._beginning

    def without_length(self) -> ResponseHead:
        """Return this head without a length, for responses whose body was received at once."""
        return ResponseHead(self.status, [header for header in self.headers if header[0] != LENGTH])


def is_decompressed(encoding: str) -> bool:
    """Return whether a content-encoding is one that `router.http.compression` decompresses: gzip or zlib."""
    return encoding.strip().lower() in _DECOMPRESSED


def _is_ours(name: bytes) -> bool:
    """Return whether a header is one of the router's, or would be read as one: many programs take `_` for `-`."""
    if b"_" in name:
        name = name.replace(b"_", b"-")
        return name.startswith(_OUR_PREFIX) or name == REQUEST_ID
    return name.startswith(_OUR_PREFIX)


class Cors:
    """The CORS rules of a service. Browser credentials are never allowed: pages send API keys in headers."""

    __slots__ = ("_allows_any", "_methods", "_origins")

    def __init__(self, origins: Collection[str], methods: Collection[str]) -> None:
        """Create the rules for origins (`*`: all) and methods that their pages may use."""
        self._allows_any = _ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)
        self._methods = frozenset(methods)

    def lines(self, headers: Headers) -> bytes:
        """Return the header lines that the response to a request with these headers gets."""
        origin = _first(headers, b"origin")
        if not origin:
            return b"vary: Origin\r\n"
        return b"%bvary: Origin\r\naccess-control-expose-headers: %b\r\n" % (self._allowed(origin), _EXPOSED)

    def preflight(self, method: str, headers: Headers) -> tuple[int, Headers, bytes] | None:
        """Return the response to a preflight request; None for others. `lines` are sent with the response too."""
        wanted = _first(headers, b"access-control-request-method")
        origin = _first(headers, b"origin")
        if method != "OPTIONS" or not origin or not wanted:
            return None
        problems = [] if self._allowed(origin) else ["origin"]
        if wanted.decode("latin-1") not in self._methods:
            problems.append("method")
        response = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"access-control-allow-methods", ", ".join(sorted(self._methods)).encode()),
            (b"access-control-max-age", b"%d" % _MAX_AGE_SECONDS),
        ]
        if named := _first(headers, b"access-control-request-headers"):
            response.append((b"access-control-allow-headers", named))
        if problems:
            return 400, response, f"Disallowed CORS {', '.join(problems)}".encode()
        return 200, response, b"OK"

    def _allowed(self, origin: bytes) -> bytes:
        if self._allows_any:
            return b"access-control-allow-origin: *\r\n"
        return b"access-control-allow-origin: %b\r\n" % origin if origin in self._origins else b""


def without_cors(headers: Headers) -> Headers:
    """Return response headers without those that say which pages may read it: an engine's own do not count."""
    return [header for header in headers if header[0] not in _OVERRIDDEN]


def _first(headers: Headers, name: bytes) -> bytes:
    return next((value for known, value in headers if known == name), b"")
