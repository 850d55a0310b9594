"""Cross-origin resource sharing (CORS): which web pages may call this service and read its responses."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from router.http.headers import Headers

_ANY: Final = "*"
# Headers of `Cors.lines`, and one that would allow credentials.
_OVERRIDDEN: Final = frozenset(
    (b"access-control-allow-origin", b"access-control-expose-headers", b"access-control-allow-credentials")
)
_MAX_AGE_SECONDS: Final = 600
# Response headers beside the simple ones that a page may read.
_EXPOSED: Final = b"x-request-id, x-kvrouter-worker, x-kvrouter-overlap-tokens, x-kvrouter-attempts, retry-after"


class Cors:
    """The CORS rules of a service.

    Browser credentials are never allowed: pages send API keys in headers, which they set themselves.
    """

    __slots__ = ("_allows_any", "_methods", "_origins")

    def __init__(self, origins: Collection[str], methods: Collection[str]) -> None:
        """Create the rules.

        - `origins`: origins whose pages may call; `*` allows all.
        - `methods`: HTTP methods that pages may use.
        """
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
        """Return the response to a preflight request; None for any other request.

        `lines` are sent with the response too.
        """
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
