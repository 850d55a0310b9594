"""Transfers over plain sockets: the default, between any two hosts that reach each other.

The payload follows the frame that names its destination. The receiver reads it directly into granted memory, or drops
it if it refuses. Only the receiver's own threads write to its pages, and only inside of the grant. So a revoked grant
is quiescent at once.
"""

from __future__ import annotations

import time

from worker.kv_transfer.transfer.channel import SILENCE_SECONDS, Buffers, Channel, Kind
from worker.kv_transfer.transfer.endpoint import Endpoint, listen
from worker.kv_transfer.transfer.engine import GrantKey, RefusedError
from worker.kv_transfer.transfer.runs import Writes
from worker.kv_transfer.transfer.writing import FrameWriter, decode_runs, encode_runs, next_write


class TcpEngine(Endpoint):
    """A TransferEngine over TCP. It listens on a free port of `host`, to which peers connect."""

    name = "tcp"

    def __init__(self, host: str = "127.0.0.1", secret: bytes | None = None) -> None:
        super().__init__(listen(host), secret)

    def _writer(self, channel: Channel, deadline: float) -> FrameWriter:  # noqa: ARG002
        def send(key: GrantKey, frame: Writes, deadline: float) -> None:
            payload = self.memory.views(frame.sources, frame.lengths)
            channel.send(Kind.WRITE, encode_runs(key, frame.destinations, frame.lengths), deadline, payload)

        return FrameWriter(channel, self.memory, send)

    def _serve(self, channel: Channel) -> None:
        while True:
            key, (destinations, lengths) = decode_runs(next_write(channel, Kind.WRITE), 2)
            left = int(lengths.sum())
            try:
                grant = self.grants.find(key, destinations, lengths)
                buffers = Buffers(self.memory.views(destinations, lengths))
                while left:
                    channel.wait_readable(time.monotonic() + SILENCE_SECONDS, left)
                    with grant:
                        channel.read_now(buffers)
                    left = buffers.left
            except RefusedError as error:
                channel.discard(left)
                channel.answer(Kind.REFUSED, str(error).encode())
            else:
                channel.answer(Kind.LANDED)
