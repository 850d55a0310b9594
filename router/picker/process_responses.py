"""Messages to Envoy: `ProcessingResponse`s of external processing, as bytes.

They are encoded field by field, because protobuf's objects would add a tenth to a request's time. All used fields have
numbers below 16, whose tag is one byte (https://protobuf.dev/programming-guides/encoding).
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Final

from router.http.headers import Headers, are_headers

_FIXED_64 = 1
_LENGTH_DELIMITED = 2
_ONE_BYTE = 0x80


def varint(number: int) -> bytes:
    """Encode a number of at least 0."""
    if number < _ONE_BYTE:
        return bytes((number,))
    found = bytearray()
    while number >= _ONE_BYTE:
        found.append(number & 0x7F | _ONE_BYTE)
        number >>= 7
    found.append(number)
    return bytes(found)


def field(number: int, value: bytes) -> bytes:
    """Encode a field with bytes, a string or a message."""
    size = len(value)
    if size < _ONE_BYTE:
        return bytes((number << 3 | _LENGTH_DELIMITED, size)) + value
    return bytes((number << 3 | _LENGTH_DELIMITED,)) + varint(size) + value


def number_field(number: int, value: int) -> bytes:
    """Encode a field with a number, an enum or a bool. The result is empty for 0, the default of a missing field."""
    return bytes((number << 3,)) + varint(value) if value else b""


DESTINATION: Final = "x-gateway-destination-endpoint"
_DESTINATION: Final = DESTINATION.encode()
_SCORES: Final = b"x-gateway-destination-endpoint-scores"
_LB_NAMESPACE: Final = b"envoy.lb"
_OWN_NAMESPACE: Final = b"kvrouter"
_REQUEST: Final = b"request"

# The largest chunk that Envoy accepts in the mode FULL_DUPLEX_STREAMED.
CHUNK_BYTES: Final = 63 * 1024

# Fields of ProcessingResponse.
_REQUEST_HEADERS: Final = 1
_RESPONSE_HEADERS: Final = 2
_REQUEST_BODY: Final = 3
_RESPONSE_BODY: Final = 4
_REQUEST_TRAILERS: Final = 5
_RESPONSE_TRAILERS: Final = 6
_IMMEDIATE_RESPONSE: Final = 7
_DYNAMIC_METADATA: Final = 8
_MODE_OVERRIDE: Final = 9
# Fields of CommonResponse, which is the first field of most responses.
_RESPONSE: Final = 1
_HEADER_MUTATION: Final = 2
_BODY_MUTATION: Final = 3
_CLEAR_ROUTE_CACHE: Final = number_field(5, 1)
_STREAMED: Final = 3
_OVERWRITE: Final = number_field(3, 2)

# Up to this size, the lengths of a header and of the messages around it need one byte each.
_SHORT: Final = 124

# Responses that change nothing.
KEEP_REQUEST_HEADERS: Final = field(_REQUEST_HEADERS, b"")
KEEP_REQUEST_TRAILERS: Final = field(_REQUEST_TRAILERS, b"")
KEEP_RESPONSE_HEADERS: Final = field(_RESPONSE_HEADERS, b"")
KEEP_RESPONSE_BODY: Final = field(_RESPONSE_BODY, b"")
KEEP_RESPONSE_TRAILERS: Final = field(_RESPONSE_TRAILERS, b"")

# Envoy keeps the response's body (NONE, which is 0), and sends its trailers (SEND).
NO_RESPONSE_BODY: Final = field(_MODE_OVERRIDE, number_field(6, 1))


class Routed:
    """Encoder of a routing decision.

    - `number`: identifies the response if Envoy shows it in another stream.
    - `before`, `after`: the received headers, and those to forward.
    - `scores`: the score of each candidate's endpoint; None: they are not reported.
    - `reported`: routing headers for the response. They are metadata, so that Envoy can add them by itself.
    """

    __slots__ = ("_metadata", "_mutation")

    def __init__(
        self,
        endpoints: str,
        number: str,
        before: Headers,
        after: Headers,
        path: str | None,
        reported: Headers,
        scores: dict[str, float] | None = None,
    ) -> None:
        header, metadata = _destination(endpoints)
        if scores is not None:
            scored = b"".join([_entry(address.encode(), _double(score)) for address, score in scores.items()])
            lb = _entry(_DESTINATION, field(3, endpoints.encode())) + _entry(_SCORES, _structure(scored))
            metadata = _entry(_LB_NAMESPACE, _structure(lb))
        parts = [header]
        if path is not None:
            parts.append(_set(b":path", path.encode("latin-1")))
        parts += _new(before, after)
        left = {name for name, _ in after}
        parts += [field(2, name) for name in {name for name, _ in before} - left if name != _DESTINATION]
        self._mutation = field(_HEADER_MUTATION, b"".join(parts)) + _CLEAR_ROUTE_CACHE
        entries = b"".join([_entry(name, field(3, value)) for name, value in [(_REQUEST, number.encode()), *reported]])
        own = _entry(_OWN_NAMESPACE, _structure(entries))
        self._metadata = field(_DYNAMIC_METADATA, metadata + own)

    def to_headers(self) -> bytes:
        """Encode the decision as a response to the request's headers."""
        return field(_REQUEST_HEADERS, field(_RESPONSE, self._mutation)) + self._metadata

    def to_body(self, body: bytes | None) -> bytes:
        """Encode the decision as a response to a whole body (BUFFERED). `body` replaces it; None keeps it."""
        changed = b"" if body is None else field(_BODY_MUTATION, field(1, body))
        return field(_REQUEST_BODY, field(_RESPONSE, self._mutation + changed)) + self._metadata


@lru_cache(maxsize=4096)
def _destination(endpoints: str) -> tuple[bytes, bytes]:
    """Encode endpoints as a header and as an entry of metadata. Results are cached, because fleets are small."""
    value = endpoints.encode()
    entry = _entry(_DESTINATION, field(3, value))
    return _set(_DESTINATION, value), _entry(_LB_NAMESPACE, _structure(entry))


def request_chunks(body: bytes, ends: bool) -> Iterator[bytes]:
    """Encode a request's body in chunks. `ends`: no trailers follow."""
    return _chunks(_REQUEST_BODY, body, ends)


def response_chunks(body: bytes, ends: bool) -> Iterator[bytes]:
    """Encode bytes of a response's body in chunks. `ends`: they are its last bytes."""
    return _chunks(_RESPONSE_BODY, body, ends)


def _chunks(kind: int, body: bytes, ends: bool) -> Iterator[bytes]:
    size = len(body)
    for start in range(0, max(size, 1), CHUNK_BYTES):
        part = body if size <= CHUNK_BYTES else body[start : start + CHUNK_BYTES]
        last = ends and start + CHUNK_BYTES >= size
        streamed = field(_STREAMED, field(1, part) + number_field(2, last))
        yield field(kind, field(_RESPONSE, field(_BODY_MUTATION, streamed)))


def response_headers(before: Headers, after: Headers, mode: bytes = b"") -> bytes:
    """Encode the added headers of a response. `mode`: an encoded change of what Envoy sends of its body."""
    mutation = field(_HEADER_MUTATION, b"".join(_new(before, after)))
    return field(_RESPONSE_HEADERS, field(_RESPONSE, mutation)) + mode


def immediate(status: int, headers: Headers, body: bytes, details: str) -> bytes:
    """Encode a response that Envoy sends to the client at once, in place of a worker's."""
    mutation = b"".join(_new([], [each for each in headers if each[0] != b"content-length"]))
    return field(
        _IMMEDIATE_RESPONSE,
        field(1, number_field(1, status)) + field(2, mutation) + field(3, body) + field(5, details.encode()),
    )


def _new(before: Headers, after: Headers) -> Iterable[bytes]:
    """Encode the headers that were not there before. Raises ValueError for what is no header."""
    new = [header for header in after if header not in before]
    if not are_headers(new):
        raise ValueError("a header for Envoy has a name that is no token, or a value that is no part of a line")
    return [_set(*header) for header in new]


def _set(name: bytes, value: bytes) -> bytes:
    """Encode a header of a HeaderMutation. It replaces headers with the same name."""
    size = len(name) + len(value) + 4
    if size < _SHORT:  # equal bytes in one step
        return b"\n%c\n%c\n%c%b\x1a%c%b%b" % (size + 4, size, len(name), name, len(value), value, _OVERWRITE)
    return field(1, field(1, field(1, name) + field(3, value)) + _OVERWRITE)


def _entry(key: bytes, value: bytes) -> bytes:
    return field(1, field(1, key) + field(2, value))


def _double(number: float) -> bytes:
    """Encode a number as a Value."""
    return bytes((2 << 3 | _FIXED_64,)) + struct.pack("<d", number)


def _structure(entries: bytes) -> bytes:
    return field(5, entries)
