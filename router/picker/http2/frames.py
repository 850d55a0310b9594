"""The bytes of HTTP/2's frames: RFC 9113, section 6."""

from __future__ import annotations

from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD_BYTES: Final = 9
# The length in two parts, the type, the flags, the stream.
HEAD: Final = Struct(">BHBBL")
STREAM_BITS: Final = 0x7FFFFFFF
LARGEST_WINDOW: Final = 2**31 - 1
DEFAULT_WINDOW: Final = 65_535
DEFAULT_FRAME: Final = 16_384
LARGEST_FRAME: Final = 2**24 - 1

DATA: Final = 0
HEADERS: Final = 1
PRIORITY: Final = 2
RST_STREAM: Final = 3
SETTINGS: Final = 4
PUSH_PROMISE: Final = 5
PING: Final = 6
GOAWAY: Final = 7
WINDOW_UPDATE: Final = 8
CONTINUATION: Final = 9

END_STREAM: Final = 0x1
ACK: Final = 0x1
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
WITH_PRIORITY: Final = 0x20

HEADER_TABLE_SIZE: Final = 1
ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6

NO_ERROR: Final = 0
PROTOCOL_ERROR: Final = 1
INTERNAL_ERROR: Final = 2
FLOW_CONTROL_ERROR: Final = 3
STREAM_CLOSED: Final = 5
FRAME_SIZE_ERROR: Final = 6
REFUSED_STREAM: Final = 7
CANCEL: Final = 8
COMPRESSION_ERROR: Final = 9
ENHANCE_YOUR_CALM: Final = 11

_SETTING = Struct(">HL")
_LONG = Struct(">L")
_NAMES: Final = {
    PRIORITY: "PRIORITY",
    RST_STREAM: "RST_STREAM",
    SETTINGS: "SETTINGS",
    PING: "PING",
    GOAWAY: "GOAWAY",
    WINDOW_UPDATE: "WINDOW_UPDATE",
}
_SIZES: Final = {PRIORITY: 5, RST_STREAM: 4, PING: 8, WINDOW_UPDATE: 4}
_LEAST_GOAWAY: Final = 8
_OF_CONNECTIONS: Final = (SETTINGS, PING, GOAWAY)
_OF_STREAMS: Final = (PRIORITY, RST_STREAM)


class Http2Error(Exception):
    """An error that ends a connection. `code` is one of RFC 9113, section 7."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Encode a frame."""
    size = len(payload)
    return HEAD.pack(size >> 16, size & 0xFFFF, kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """Encode a SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(_SETTING.pack(*each) for each in values.items()))


def read_settings(payload: bytes) -> list[tuple[int, int]]:
    """Decode the (name, value) pairs of a SETTINGS frame. Raises Http2Error for invalid values."""
    if len(payload) % _SETTING.size:
        raise Http2Error(FRAME_SIZE_ERROR, "SETTINGS of a length that is no multiple of 6")
    found = list(_SETTING.iter_unpack(payload))
    for name, value in found:
        if name == ENABLE_PUSH and value > 1:
            raise Http2Error(PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        if name == INITIAL_WINDOW_SIZE and value > LARGEST_WINDOW:
            raise Http2Error(FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is above 2^31-1")
        if name == MAX_FRAME_SIZE and not DEFAULT_FRAME <= value <= LARGEST_FRAME:
            raise Http2Error(PROTOCOL_ERROR, "MAX_FRAME_SIZE is not between 2^14 and 2^24-1")
    return found


def window_update(stream: int, size: int) -> bytes:
    """Encode a WINDOW_UPDATE frame, which allows a peer to send `size` more bytes."""
    return frame(WINDOW_UPDATE, 0, stream, _LONG.pack(size))


def reset(stream: int, code: int) -> bytes:
    """Encode a RST_STREAM frame, which ends a stream."""
    return frame(RST_STREAM, 0, stream, _LONG.pack(code))


def goaway(last: int, code: int, reason: str = "") -> bytes:
    """Encode a GOAWAY frame, which ends a connection: streams after `last` are not processed."""
    return frame(GOAWAY, 0, 0, _LONG.pack(last) + _LONG.pack(code) + reason.encode())


def read_long(payload: bytes) -> int:
    """Decode a payload of 31 bits."""
    number: int = _LONG.unpack(payload)[0]
    return number & STREAM_BITS


def check_control(kind: int, flags: int, stream: int, payload: bytes) -> None:
    """Check the length of a control frame, and that it has a stream only if its kind needs one. Raises Http2Error."""
    if kind == PUSH_PROMISE:
        raise Http2Error(PROTOCOL_ERROR, "PUSH_PROMISE from a client")
    if stream and kind in _OF_CONNECTIONS:
        raise Http2Error(PROTOCOL_ERROR, f"{_NAMES[kind]} for a stream")
    if not stream and kind in _OF_STREAMS:
        raise Http2Error(PROTOCOL_ERROR, f"{_NAMES[kind]} without a stream")
    wrong = _SIZES.get(kind, len(payload)) != len(payload)
    if wrong or (kind == GOAWAY and len(payload) < _LEAST_GOAWAY):
        raise Http2Error(FRAME_SIZE_ERROR, f"{_NAMES[kind]} of {len(payload)} bytes")
    if kind == SETTINGS and flags & ACK and payload:
        raise Http2Error(FRAME_SIZE_ERROR, "an acknowledgement that sets something")


def check_dependency(stream: int, payload: bytes) -> None:
    """Check that a stream does not depend on itself. `payload` begins with the dependency. Raises Http2Error."""
    if int.from_bytes(payload[:4], "big") & STREAM_BITS == stream:
        raise Http2Error(PROTOCOL_ERROR, "a stream that depends on itself")


def unpadded(flags: int, payload: bytes) -> bytes:
    """Return the payload of a DATA or HEADERS frame without its padding. Raises Http2Error."""
    if not flags & PADDED:
        return payload
    if not payload or payload[0] >= len(payload):
        raise Http2Error(PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]
