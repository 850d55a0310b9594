"""Protobuf as bytes: messages whose fields are few and known are written faster so than as objects.

https://protobuf.dev/programming-guides/encoding. Fields have numbers below 16, whose tag is one byte.
"""

from __future__ import annotations

_LENGTH_DELIMITED = 2
_ONE_BYTE = 0x80


def varint(number: int) -> bytes:
    """A number from 0 on."""
    if number < _ONE_BYTE:
        return bytes((number,))
    found = bytearray()
    while number >= _ONE_BYTE:
        found.append(number & 0x7F | _ONE_BYTE)
        number >>= 7
    found.append(number)
    return bytes(found)


def field(number: int, value: bytes) -> bytes:
    """A field that is bytes, a string or a message."""
    size = len(value)
    if size < _ONE_BYTE:
        return bytes((number << 3 | _LENGTH_DELIMITED, size)) + value
    return bytes((number << 3 | _LENGTH_DELIMITED,)) + varint(size) + value


def number_field(number: int, value: int) -> bytes:
    """A field that is a number, an enum or a bool; nothing where it is 0, which is what it is without."""
    return bytes((number << 3,)) + varint(value) if value else b""
