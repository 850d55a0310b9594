"""The handshake of WebSockets (RFC 6455, section 4): the headers of both sides, and the head of a worker's answer."""

from __future__ import annotations

from base64 import b64encode
from hashlib import sha1
from secrets import token_bytes
from typing import Final

from http_api.errors import RequestError
from router.http.headers import LENGTH, Headers, ResponseHead, is_token, whole_number

_GUID: Final = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
PREFIX: Final = b"sec-websocket-"
SWITCHING: Final = 101


def accept_value(key: bytes) -> bytes:
    """Return the value of `sec-websocket-accept` for a key."""
    return b64encode(sha1(key + _GUID).digest())


def new_key() -> bytes:
    """Return a value of `sec-websocket-key`."""
    return b64encode(token_bytes(16))


def handshake_key(headers: Headers) -> bytes:
    """Return the key of a client's handshake. Raises RequestError (426) if the request is no handshake."""
    given = dict(headers)
    upgrades = b"websocket" in given.get(b"upgrade", b"").lower()
    key = given.get(b"sec-websocket-key", b"").strip()
    if not upgrades or len(key) != 24 or given.get(b"sec-websocket-version", b"").strip() != b"13":
        raise RequestError("This route is a WebSocket. Connect with version 13 of its protocol.", status=426)
    return key


def response_head(data: bytes) -> ResponseHead:
    """Parse the head of a response to a handshake. Raises ValueError."""
    first, *lines = data.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    if (
        not version.startswith(b"HTTP/1.")
        or not rest[:3].isdigit()
        or rest[3:4] not in (b"", b" ")
        or any(b"\n" in line or b"\r" in line or b"\0" in line for line in lines)
    ):
        raise ValueError("its answer to the handshake is not HTTP")
    headers = [(name.lower(), value.strip()) for name, _, value in (line.partition(b":") for line in lines)]
    if not all(is_token(name) for name, _ in headers):
        raise ValueError("its answer to the handshake has an invalid header name")
    head = ResponseHead(int(rest[:3]), headers)
    lengths = {value for name, value in headers if name == LENGTH}
    if len(lengths) > 1 or any(whole_number(length) is None for length in lengths):
        raise ValueError("the length of its answer to the handshake is not one number")
    return head
