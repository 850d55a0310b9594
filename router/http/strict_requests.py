"""The one form in which a request's head is accepted, so that every reader of it reads the same request.

Dot segments, doubled slashes, backslashes and needless encoding in a path are refused. So a path can be compared as
text, and its bytes forwarded unchanged. RFC 9112 has the other rules: 2.3 (version), 3.2 (target, Host) and 6.1
(Transfer-Encoding).
"""

from __future__ import annotations

import re
from ipaddress import IPv6Address
from typing import Final
from urllib.parse import unquote_to_bytes

from router.http.headers import Headers

# RFC 3986, 3.3: the characters that a path has unencoded, and any byte as %XX with capital digits.
_PATH: Final = re.compile(rb"/(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-F]{2})*")
# The router does not read queries. But a query must not end a line, nor seem to end the target.
_QUERY: Final = re.compile(rb"[!-~]*")
_NOT_IN_QUERY: Final = re.compile(rb"[#\\]")
# RFC 3986, 2.3: these mean the same whether they are encoded or not.
_UNRESERVED: Final = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-._~")
_PERCENT, _SLASH, _BACKSLASH, _SPACE, _DELETE = b"%/\\ \x7f"
# RFC 3986, 3.2, without user information, which RFC 9110, 4.2.4 and RFC 9113, 8.3.1 forbid.
_AUTHORITY: Final = re.compile(
    rb"(?:\[([0-9A-Fa-f:.]{2,45})\]|(?:[A-Za-z0-9._~!$&'()*+,;=-]|%[0-9A-Fa-f]{2})+)(?::[0-9]{0,5})?"
)
_VERSIONS: Final = ("1.1", "1.0")
# A path with its query. A fragment is no part of a request's target, and a worker would not get it.
_TARGET: Final = re.compile(rb"/[!-\"$-~]*")


class TargetError(ValueError):
    """A target that is not accepted; the message says why."""


def without_root(target: bytes, root: bytes) -> bytes:
    """Return a target without the root path of this service, if it begins with that."""
    if not target.startswith(root):
        return target
    rest = target[len(root) :]
    if rest[:1] == b"/":
        return rest
    return b"/" + rest if rest[:1] in (b"", b"?") else target


def canonical_path(target: bytes, encoded_slashes: bool = False) -> str:
    """Return a target's decoded path. `encoded_slashes`: `%2F` is accepted, as a slash. Raises TargetError."""
    raw, question_mark, query = target.partition(b"?")
    if question_mark and (_QUERY.fullmatch(query) is None or _NOT_IN_QUERY.search(query)):
        raise TargetError("its query has a character that must be percent-encoded")
    if _PATH.fullmatch(raw) is None:
        raise TargetError("its path has a character that must be percent-encoded, with capital digits")
    path = raw if b"%" not in raw else _decoded(raw, encoded_slashes)
    if b"//" in path:
        raise TargetError("its path has a doubled slash")
    if b"/." in path and not {b".", b".."}.isdisjoint(path.split(b"/")):
        raise TargetError("its path has dot segments")
    try:
        return path.decode()
    except UnicodeDecodeError as error:
        raise TargetError("its path is not UTF-8") from error


def _decoded(raw: bytes, encoded_slashes: bool) -> bytes:
    for part in raw.split(b"%")[1:]:
        byte = int(part[:2], 16)
        if byte == _SLASH and encoded_slashes:
            continue
        if byte in (_PERCENT, _SLASH, _BACKSLASH, _DELETE) or byte < _SPACE:
            raise TargetError(f"its path has %{part[:2].decode()}, which is not accepted")
        if byte in _UNRESERVED:
            raise TargetError(f"its path has %{part[:2].decode()}, which needs no encoding")
    return unquote_to_bytes(raw)


def is_authority(value: bytes) -> bool:
    """Return whether a value is a host, and a port if one is given, as `Host` and `:authority` have them."""
    found = _AUTHORITY.fullmatch(value)
    if found is None or found[1] is None:
        return found is not None
    try:
        IPv6Address(found[1].decode("ascii"))
    except ValueError:
        return False
    return True


def head_problem(target: bytes, version: str, headers: Headers) -> str | None:
    """Return why a head is refused; None if it is accepted. Names of headers are in lower case."""
    if _TARGET.fullmatch(target) is None:
        return "the request target must be an absolute path without a fragment"
    if version not in _VERSIONS:
        return "unsupported HTTP version: use 1.1 or 1.0"
    hosts = codings = lengths = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if value and not is_authority(value):
                return "the Host header must be a host with an optional port"
        elif name == b"transfer-encoding":
            codings += 1
            if value.strip().lower() != b"chunked":
                return "unsupported transfer coding: use chunked"
        elif name == b"content-length":
            lengths += 1
    if hosts > 1 or (not hosts and version == "1.1"):
        return "expected exactly one Host header"
    if codings > 1 or (codings and (lengths or version != "1.1")) or lengths > 1:
        return "expected at most one Content-Length or Transfer-Encoding header"
    return None
