"""Header blocks (RFC 7541). Equal received blocks are decoded once, and sent blocks are constants.

Headers of HTTP/2 become lines of HTTP/1.1. So a block is valid only if each of its headers is one (RFC 9113, 8.2.1).
"""

from __future__ import annotations

import re
from typing import Final

import hpack
from hpack.exceptions import HPACKError

from router.http.headers import LENGTH, Headers, are_headers, is_token, whole_number
from router.http.strict_requests import is_authority
from router.picker.http2 import frames

# The largest header list of a request, which SETTINGS announces: names, values, and 32 bytes for each header.
MOST_BYTES: Final = 32 * 1024
_REMEMBERED: Final = 256

_NEEDED: Final = {b":method", b":scheme", b":path"}
_PSEUDO: Final = _NEEDED | {b":authority"}
_OF_A_CONNECTION: Final = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}
_SCHEME: Final = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*")
_PATH: Final = re.compile(rb"/[!-\"$-~]*")


class RequestHeaders:
    """A decoded header block.

    - `is_request`: the headers are valid for a request (RFC 9113, 8.2 and 8.3).
    - `length`: the bytes of the body that `content-length` announces; None without one.
    """

    __slots__ = ("headers", "is_grpc", "is_request", "length", "path")

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        self.is_request = _is_request(headers)
        self.length = whole_number(self.first(LENGTH))
        self.path = self.first(b":path")
        grpc = self.first(b"content-type").startswith(b"application/grpc")
        self.is_grpc = grpc and self.first(b":method") == b"POST"

    def first(self, name: bytes) -> bytes:
        """Return the first value of a header; empty if the block does not have it."""
        for known, value in self.headers:
            if known == name:
                return value
        return b""

    def are_trailers(self) -> bool:
        """Return whether the headers are valid for trailers: they have no pseudo-header."""
        return are_regular(self.headers)


class HeaderDecoder:
    """The decoder of a connection's header blocks. It caches results until the dynamic table changes."""

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MOST_BYTES)
        self._known: dict[bytes, RequestHeaders] = {}

    def decode(self, block: bytes) -> RequestHeaders:
        """Decode a block. Raises Http2Error, after which the dynamic tables of both ends may differ."""
        known = self._known.get(block)
        if known is not None:
            return known
        try:
            decoded = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            raise frames.Http2Error(frames.COMPRESSION_ERROR, f"invalid header block: {error}") from error
        found = RequestHeaders([(bytes(name), bytes(value)) for name, value in decoded])
        if not leaves_table(block):
            self._known.clear()
        elif len(self._known) < _REMEMBERED:
            self._known[block] = found
        return found


def leaves_table(block: bytes) -> bool:
    """Return whether a well-formed block leaves the dynamic table and its size unchanged."""
    at, end = 0, len(block)
    while at < end:
        first = block[at]
        if first & 0x80:  # a reference to a header
            _, at = _integer(block, at, 7)
        elif first & 0x60:  # a header that is added, or another size
            return False
        else:  # a header that is not added: its name may be a reference
            name, at = _integer(block, at, 4)
            for _ in range(1 if name else 2):
                size, at = _integer(block, at, 7)
                at += size
    return True


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """Decode an integer with a prefix of `bits` bits (RFC 7541, 5.1). Return it, and the offset of its end."""
    most = (1 << bits) - 1
    number = block[at] & most
    at += 1
    if number < most:
        return number, at
    shift = 0
    while True:
        number += (block[at] & 0x7F) << shift
        shift += 7
        at += 1
        if not block[at - 1] & 0x80:
            return number, at


def literal(name: bytes, value: bytes) -> bytes:
    """Encode a header without adding it to the dynamic table. Name and value must have fewer than 127 bytes."""
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


def _is_request(headers: Headers) -> bool:
    pseudo: dict[bytes, bytes] = {}
    for name, value in headers:
        if name[:1] != b":":
            break
        if name in pseudo:
            return False
        pseudo[name] = value
    if not _NEEDED <= pseudo.keys() <= _PSEUDO or not _are_pseudo(pseudo):
        return False
    return are_regular(headers[len(pseudo) :])


def _are_pseudo(pseudo: dict[bytes, bytes]) -> bool:
    method, path = pseudo[b":method"], pseudo[b":path"]
    return (
        is_token(method)
        and _SCHEME.fullmatch(pseudo[b":scheme"]) is not None
        and (_PATH.fullmatch(path) is not None or (path == b"*" and method == b"OPTIONS"))
        and (b":authority" not in pseudo or is_authority(pseudo[b":authority"]))
    )


def are_regular(headers: Headers) -> bool:
    """Return whether HTTP/2 has these headers: names in lower case, values that are part of one line, one length."""
    if not are_headers(headers):
        return False
    names = [name for name, _ in headers]
    if not _OF_A_CONNECTION.isdisjoint(names):
        return False
    if b"te" in names and any(value != b"trailers" for name, value in headers if name == b"te"):
        return False
    if LENGTH not in names:
        return True
    lengths = [value for name, value in headers if name == LENGTH]
    return len(lengths) == 1 and whole_number(lengths[0]) is not None
