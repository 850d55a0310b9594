"""Frames of an event stream and of its replay.

A publisher sends `[topic, sequence number, payload]` on a PUB socket. Sequence numbers
are 8 bytes, big-endian.

A subscriber that missed batches sends `[empty, start]` from a DEALER to the publisher's ROUTER. It receives the batches
from `start` on as `[empty, topic, sequence number, payload]`, and then an end marker. Older engines omit the topic.

If a replay does not have the missing batches, a subscriber may request a snapshot: the batches from `SNAPSHOT_START`
on. Engines do not have these batches, and answer with only the end marker. A publisher that knows its engine's cache
first sends `[empty, topic, sequence number, payload, part]` messages. Their batches announce all blocks that are cached
after the batch with this sequence number. The first batch has a clear, and the last payload is empty. Parts are
numbered from 0 (4 bytes, big-endian), so that a subscriber detects a missing part.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

END_OF_REPLAY = b"\xff" * 8
SNAPSHOT_START = 2**64 - 2  # requests a snapshot, in place of a sequence number


class MalformedFrameError(ValueError):
    """A multipart message that is not a frame of an event stream."""


class StreamFrame(msgspec.Struct, frozen=True, gc=False):
    """One event batch in transit: its sequence number and its encoded payload."""

    seq: int
    payload: bytes


def encode_seq(seq: int) -> bytes:
    """Return the wire form of a sequence number."""
    return seq.to_bytes(8, "big")


def live_frames(topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return the multipart message that publishes one batch."""
    return [topic, encode_seq(seq), payload]


def parse_live(parts: Sequence[bytes]) -> StreamFrame:
    """Parse a PUB message. Raises MalformedFrameError."""
    if len(parts) != 3:
        raise MalformedFrameError(f"a stream message has 3 frames, this one {len(parts)}")
    return StreamFrame(_parse_seq(parts[1]), parts[2])


def replay_request(start: int) -> list[bytes]:
    """Return the message of a DEALER that requests every batch from `start` on."""
    return [b"", encode_seq(start)]


def parse_replay_request(parts: Sequence[bytes]) -> tuple[bytes, int]:
    """Parse a replay request on the ROUTER side: the client's identity and the first requested sequence number."""
    if len(parts) != 3:
        raise MalformedFrameError(f"a replay request has 3 frames, this one {len(parts)}")
    return parts[0], _parse_seq(parts[2])


def replay_frames(client: bytes, topic: bytes, seq: int, payload: bytes) -> list[bytes]:
    """Return the message of a ROUTER to a client for one replayed batch."""
    return [client, b"", topic, encode_seq(seq), payload]


def end_of_replay_frames(client: bytes) -> list[bytes]:
    """Return the message of a ROUTER to a client after the last replayed batch. Engines send no topic with it."""
    return [client, b"", b"", END_OF_REPLAY, b""]


def parse_replay(parts: Sequence[bytes]) -> StreamFrame | None:
    """Parse a replay message of a DEALER: a batch, or None for the end marker. Raises MalformedFrameError."""
    if len(parts) not in (3, 4):
        raise MalformedFrameError(f"a replay message has 3 or 4 frames, this one {len(parts)}")
    seq, payload = parts[-2], parts[-1]
    if seq == END_OF_REPLAY:
        return None
    return StreamFrame(_parse_seq(seq), payload)


def snapshot_frames(client: bytes, topic: bytes, part: int, frame: StreamFrame) -> list[bytes]:
    """Return the message of a ROUTER for one part of a snapshot; the last part has an empty payload."""
    return [client, b"", topic, encode_seq(frame.seq), frame.payload, part.to_bytes(4, "big")]


def is_snapshot(parts: Sequence[bytes]) -> bool:
    """Return whether a message of a DEALER is part of a snapshot."""
    return len(parts) == 5


def parse_snapshot(parts: Sequence[bytes]) -> tuple[int, StreamFrame]:
    """Parse a part of a snapshot: its number and its batch. Raises MalformedFrameError."""
    if len(parts) != 5 or len(parts[4]) != 4:
        raise MalformedFrameError("a part of a snapshot has 5 frames, the last of 4 bytes")
    return int.from_bytes(parts[4], "big"), StreamFrame(_parse_seq(parts[2]), parts[3])


def _parse_seq(frame: bytes) -> int:
    if len(frame) != 8:
        raise MalformedFrameError(f"a sequence number has 8 bytes, this one {len(frame)}")
    return int.from_bytes(frame, "big")
