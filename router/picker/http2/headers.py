"""Header blocks: RFC 7541. Those that come again are decoded once; those that are sent never change."""

from __future__ import annotations

from typing import Final

import hpack
from hpack.exceptions import HPACKError

from router.http.headers import Headers
from router.picker.http2 import frames

# Of one request, as RFC 9113 counts: names, values, and 32 bytes each. Told to the peer.
MOST_BYTES: Final = 32 * 1024
_REMEMBERED: Final = 256

_NEEDED: Final = {b":method", b":scheme", b":path"}
_PSEUDO: Final = _NEEDED | {b":authority"}
_OF_A_CONNECTION: Final = {b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"}


class RequestHeaders:
    """A header block that was decoded. `is_request`: RFC 9113 lets a request have these (sections 8.2 and 8.3).

    `is_grpc`: it is a call.
    """

    __slots__ = ("headers", "is_grpc", "is_request", "path")

    def __init__(self, headers: Headers) -> None:
        self.headers = headers
        self.is_request = _is_request(headers)
        self.path = self.first(b":path")
        grpc = self.first(b"content-type").startswith(b"application/grpc")
        self.is_grpc = grpc and self.first(b":method") == b"POST"

    def first(self, name: bytes) -> bytes:
        """The first value of a header; empty when there is none."""
        for known, value in self.headers:
            if known == name:
                return value
        return b""


class HeaderDecoder:
    """Decodes a connection's header blocks.

    What most blocks of a gRPC client say stands in the table that both ends keep: they are references into it, the
    same ones for each call. Such a block means the same until the table changes.
    """

    def __init__(self) -> None:
        self._decoder = hpack.Decoder(max_header_list_size=MOST_BYTES)
        self._known: dict[bytes, RequestHeaders] = {}

    def decode(self, block: bytes) -> RequestHeaders:
        """The headers of a block. Raises Http2Error, after which the table is not what the peer thinks."""
        known = self._known.get(block)
        if known is not None:
            return known
        try:
            decoded = self._decoder.decode(block, raw=True)
        except HPACKError as error:
            raise frames.Http2Error(frames.COMPRESSION_ERROR, f"a header block that cannot be read: {error}") from error
        found = RequestHeaders([(bytes(name), bytes(value)) for name, value in decoded])
        if not leaves_table(block):
            self._known.clear()
        elif len(self._known) < _REMEMBERED:
            self._known[block] = found
        return found


def leaves_table(block: bytes) -> bool:
    """Whether a block that is well-formed adds nothing to the table and does not change its size."""
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
    """A number whose first byte has so many bits of it, and where it ends: RFC 7541, section 5.1."""
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
    """A header that is not added to the table. Name and value have fewer than 127 bytes."""
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


def _is_request(headers: Headers) -> bool:
    pseudo: dict[bytes, bytes] = {}
    regular = False
    for name, value in headers:
        if name[:1] == b":":
            if regular or name in pseudo:
                return False
            pseudo[name] = value
            continue
        regular = True
        if name != name.lower() or name in _OF_A_CONNECTION or (name == b"te" and value != b"trailers"):
            return False
    return _NEEDED <= pseudo.keys() <= _PSEUDO and bool(pseudo[b":path"])
