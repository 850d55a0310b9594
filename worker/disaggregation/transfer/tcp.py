"""Transfer over plain sockets: the default, wherever two hosts reach each other.

A write is one or more frames: WRITE (room, generation, how many runs; their addresses; their lengths), then the bytes,
which the receiver reads straight into granted memory. Each frame is answered in turn: LANDED, or REFUSED with the
reason, after its bytes were read and forgotten. Only the receiver's own threads touch its pages, and only inside of the
grant: a revoked grant is quiescent at once, whatever the sender does.
"""

from __future__ import annotations

import struct

import numpy as np

from worker.disaggregation.transfer.channel import Buffers, Channel, Kind
from worker.disaggregation.transfer.endpoint import Endpoint, Writer, listen
from worker.disaggregation.transfer.engine import GrantKey, PeerLostError, RefusedError
from worker.disaggregation.transfer.handshake import expect
from worker.disaggregation.transfer.memory import Memory
from worker.disaggregation.transfer.runs import Addresses, Ranges, Writes, split_writes

_WRITE = struct.Struct("<QQI")
_RUNS = 8192  # in a frame, at most
_BYTES = 1 << 25  # in a frame, at most: what is read for nothing when a frame is refused
_AHEAD = 4  # frames sent before the first must be answered


class TcpEngine(Endpoint):
    """See TransferEngine. Listens on a free port of `host`, which is also where peers find it."""

    name = "tcp"

    def __init__(self, host: str = "127.0.0.1", secret: bytes | None = None) -> None:
        """Raises ValueError for a host that can't be listened on and an empty secret."""
        super().__init__(listen(host), secret)

    def _writer(self, channel: Channel, deadline: float) -> Writer:  # noqa: ARG002
        return _TcpWriter(channel, self.memory)

    def _serve(self, channel: Channel) -> None:
        while True:
            kind, body = channel.receive()
            if kind is not Kind.WRITE:
                raise PeerLostError(f"the sender sent {kind.name} instead of WRITE")
            key, destinations, lengths = _decode(body)
            left = int(lengths.sum())
            try:
                grant = self.grants.find(key, destinations, lengths)
                buffers = Buffers(self.memory.views(destinations, lengths))
                while left:
                    with grant:
                        channel.read_now(buffers)
                    if buffers.left == left:
                        channel.wait_readable()
                    left = buffers.left
            except RefusedError as error:
                channel.discard(left)
                channel.send(Kind.REFUSED, str(error).encode())
            else:
                channel.send(Kind.LANDED)


class _TcpWriter:
    def __init__(self, channel: Channel, memory: Memory) -> None:
        self._channel, self._memory = channel, memory

    def write(self, key: GrantKey, writes: Writes, deadline: float) -> None:
        self._memory.check(Ranges(writes.sources, writes.lengths))
        unanswered = 0
        refusal: RefusedError | None = None
        frames = split_writes(writes, _RUNS, _BYTES)
        while refusal is None and (frame := next(frames, None)) is not None:
            views = self._memory.views(frame.sources, frame.lengths)
            self._channel.send(Kind.WRITE, _encode(key, frame.destinations, frame.lengths), deadline, views)
            unanswered += 1
            if unanswered == _AHEAD:
                refusal = self._answer(deadline)
                unanswered -= 1
        for _ in range(unanswered):
            refusal = self._answer(deadline) or refusal
        if refusal is not None:
            raise refusal

    def close(self) -> None:
        pass

    def _answer(self, deadline: float) -> RefusedError | None:
        try:
            expect(self._channel, Kind.LANDED, deadline)
        except RefusedError as error:
            return error
        return None


def _encode(key: GrantKey, destinations: Addresses, lengths: Addresses) -> bytes:
    head = _WRITE.pack(key.room, key.generation, len(lengths))
    return head + destinations.astype("<u8").tobytes() + lengths.astype("<u8").tobytes()


def _decode(body: bytes) -> tuple[GrantKey, Addresses, Addresses]:
    """Key, addresses and lengths. Raises PeerLostError."""
    if len(body) < _WRITE.size:
        raise PeerLostError("the sender's WRITE is too short")
    room, generation, count = _WRITE.unpack_from(body)
    if not 0 < count <= _RUNS or len(body) != _WRITE.size + 16 * count:
        raise PeerLostError(f"the sender's WRITE names {count} runs in {len(body)} bytes")
    numbers = np.frombuffer(body, "<u8", offset=_WRITE.size).astype(np.uint64, copy=False)
    destinations, lengths = numbers[:count], numbers[count:]
    if not lengths.all():
        raise PeerLostError("the sender's WRITE has an empty run")
    if lengths.max() > _BYTES or int(lengths.sum()) > _BYTES:
        raise PeerLostError(f"the sender's WRITE is longer than {_BYTES} bytes")
    return GrantKey(room, generation), destinations, lengths
