"""Writes as frames: portions that are checked and answered one by one, several of them in flight.

WRITE's body is room u64, generation u64, number of runs u32, then the columns of the runs, all u64. Each frame is
answered in order: LANDED, or REFUSED with the reason.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np

from worker.kv_transfer.transfer.channel import Channel, Kind
from worker.kv_transfer.transfer.engine import GrantKey, PeerLostError, RefusedError
from worker.kv_transfer.transfer.memory import Memory
from worker.kv_transfer.transfer.runs import Addresses, Ranges, Writes, split_writes
from worker.kv_transfer.transfer.sessions import expect

FIRST_WRITE_SECONDS = 30.0
"""Idle seconds of a session without a granted write, after which it ends."""
IDLE_SECONDS = 600.0
"""Idle seconds of a session with a granted write, after which it ends. Senders reconnect earlier."""
MOST_RUNS = 8192
"""Runs in a frame."""
MOST_BYTES = 1 << 25
"""Bytes in a frame, which are sent without effect if it is refused."""
_AHEAD = 4  # frames sent before the first must be answered
_HEAD = struct.Struct("<QQI")


class FrameWriter:
    """The sender's writer. `send` sends one frame of a write: its kind, and the engine's further data."""

    def __init__(self, channel: Channel, memory: Memory, send: Callable[[GrantKey, Writes, float], None]) -> None:
        self._channel, self._memory, self._send = channel, memory, send

    def write(self, key: GrantKey, writes: Writes, deadline: float) -> None:
        """Write as Session.write does. After a refusal, every sent frame has been answered."""
        self._memory.check(Ranges(writes.sources, writes.lengths))
        unanswered = 0
        refusal: RefusedError | None = None
        frames = split_writes(writes, MOST_RUNS, MOST_BYTES)
        while refusal is None and (frame := next(frames, None)) is not None:
            self._send(key, frame, deadline)
            unanswered += 1
            if unanswered == _AHEAD:
                refusal = self._answer(deadline)
                unanswered -= 1
        for _ in range(unanswered):
            refusal = self._answer(deadline) or refusal
        if refusal is not None:
            raise refusal

    def end(self) -> None:
        """End as Writer.end does."""
        self._channel.cut()

    def close(self) -> None:
        """Close as Writer.close does."""
        self._channel.close()

    def _answer(self, deadline: float) -> RefusedError | None:
        try:
            expect(self._channel, Kind.LANDED, deadline)
        except RefusedError as error:
            return error
        return None


def next_write(channel: Channel, kind: Kind) -> bytes:
    """Return the body of the peer's next frame, in time. Raises PeerLostError, DeadlineError and RefusedError."""
    patience = IDLE_SECONDS if channel.landed else FIRST_WRITE_SECONDS
    return expect(channel, kind, channel.idle_since + patience)


def encode_runs(key: GrantKey, *columns: Addresses) -> bytes:
    """Encode a key and its columns as a frame's body."""
    head = _HEAD.pack(key.room, key.generation, len(columns[0]))
    return b"".join([head, *(column.astype("<u8", copy=False).tobytes() for column in columns)])


def decode_runs(body: bytes, columns: int) -> tuple[GrantKey, list[Addresses]]:
    """Decode a frame's body to key and columns, the last of which are lengths. Raises PeerLostError."""
    if len(body) < _HEAD.size:
        raise PeerLostError(f"the sender's frame has a body of {len(body)} bytes")
    room, generation, count = _HEAD.unpack_from(body)
    if not 0 < count <= MOST_RUNS or len(body) != _HEAD.size + 8 * columns * count:
        raise PeerLostError(f"the sender's frame names {count} runs in {len(body)} bytes")
    numbers = np.frombuffer(body, "<u8", offset=_HEAD.size).astype(np.uint64, copy=False).reshape(columns, count)
    lengths = numbers[-1]
    if not lengths.all() or lengths.max() > MOST_BYTES or int(lengths.sum()) > MOST_BYTES:
        raise PeerLostError(f"the sender's frame has an empty run, or writes more than {MOST_BYTES} bytes")
    return GrantKey(room, generation), list(numbers)
