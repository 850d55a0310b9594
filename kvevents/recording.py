"""Recordings of event streams (`.kvrec` files): every message a subscriber received, with its time.

Big-endian, records one after another: receive time (f64, unix seconds), channel (u8: 0 live, 1 replay), source (u8:
worker or DP rank), number of frames (u8), then for each frame its length (u32) and its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_HEAD = struct.Struct(">dBBB")
_LENGTH = struct.Struct(">I")


class Channel(IntEnum):
    """Which socket a message came from."""

    LIVE = 0
    REPLAY = 1


@dataclass(frozen=True, slots=True)
class Record:
    """One received message."""

    received_at: float
    channel: Channel
    source: int
    frames: list[bytes]


class TornRecordingError(ValueError):
    """A recording that ends in the middle of a record, or is no recording."""


def read_recording(path: Path) -> Iterator[Record]:
    """Read a recording's records in the order they were received. Raises TornRecordingError."""
    data = path.read_bytes()
    offset = 0
    while offset < len(data):
        start = offset
        try:
            received_at, channel, source, count = _HEAD.unpack_from(data, offset)
            offset += _HEAD.size
            frames = []
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(data, offset)
                offset += _LENGTH.size
                frames.append(data[offset : offset + length])
                offset += length
            if offset > len(data):
                raise ValueError("the last frame is cut short")
            record = Record(received_at, Channel(channel), source, frames)
        except (struct.error, ValueError) as error:
            raise TornRecordingError(f"{path}: no whole record at byte {start}: {error}") from error
        yield record
