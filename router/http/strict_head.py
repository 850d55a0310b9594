"""What of a request's head every parser of HTTP/1.1 reads alike. llhttp takes more; the rest is refused.

RFC 9112, 2.3 (the version), 3.2 (the target, Host) and 6.1 (Transfer-Encoding).
"""

from __future__ import annotations

import re
from typing import Final

from router.http.headers import Headers

_VERSIONS: Final = ("1.1", "1.0")
# A path with its query. A fragment is no part of a request's target, and would be lost on the way.
_TARGET: Final = re.compile(rb"/[!-\"$-~]*")


def head_problem(target: bytes, version: str, headers: Headers) -> str | None:
    """Why a head is refused; None for one that is not. Names of headers are in lower case."""
    if _TARGET.fullmatch(target) is None:
        return "the target is no path"
    if version not in _VERSIONS:
        return "the version is another than HTTP/1.0 and 1.1"
    hosts = codings = lengths = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            codings += 1
            if value.strip().lower() != b"chunked":
                return "the transfer coding is another than chunked"
        elif name == b"content-length":
            lengths += 1
    if hosts > 1 or (not hosts and version == "1.1"):
        return "there is not one Host"
    if codings > 1 or (codings and (lengths or version != "1.1")) or lengths > 1:
        return "the body's length can be read in two ways"
    return None
