"""Recordings of event streams (`.kvrec` files): every message that a subscriber received, with its time.

Big-endian, records one after another: receive time (f64, unix seconds), channel (u8: 0 live, 1 replay), source (u8:
worker or DP rank), number of frames (u8), then for each frame its length (u32) and its bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType

_HEAD = struct.Struct(">dBBB")
_LENGTH = struct.Struct(">I")


class Channel(IntEnum):
    """The socket that received a message."""

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
    """A file that ends in the middle of a record, or is not a recording."""


class RecordingWriter(AbstractContextManager["RecordingWriter"]):
    """Writer of a new recording, flushed after each record. Raises OSError if the file exists or is not writable."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb")

    def write(self, record: Record) -> None:
        """Append a record. Raises ValueError for more than 255 frames or a source above 255."""
        frames = record.frames
        if len(frames) > 255 or not 0 <= record.source <= 255:
            raise ValueError(f"a record has at most 255 frames and a source up to 255, this one {len(frames)} frames")
        parts = [_HEAD.pack(record.received_at, record.channel, record.source, len(frames))]
        for frame in frames:
            parts += (_LENGTH.pack(len(frame)), frame)
        self._file.write(b"".join(parts))
        self._file.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_recording(path: Path, *, torn_end: bool = False) -> Iterator[Record]:
    """Yield the records of a recording, in their order. `torn_end`: skip a last record that is cut off.

    Raises TornRecordingError for a file that is not a recording, and for a last record that is cut off.
    """
    data = path.read_bytes()
    offset = 0
    while offset < len(data):
        start = offset
        try:
            received_at, channel, source, count = _HEAD.unpack_from(data, offset)
            known_channel = Channel(channel)
            offset += _HEAD.size
            frames = []
            for _ in range(count):
                (length,) = _LENGTH.unpack_from(data, offset)
                offset += _LENGTH.size
                frames.append(data[offset : offset + length])
                offset += length
        except ValueError as error:
            raise TornRecordingError(f"{path}: no record at byte {start}: {error}") from error
        except struct.error:
            offset = len(data) + 1
        if offset > len(data):
            if torn_end:
                return
            raise TornRecordingError(f"{path}: no whole record at byte {start}: the file ends before it does")
        yield Record(received_at, known_channel, source, frames)
