"""Damaged frames between prefill and decode workers: none raises anything unforeseen, or lands outside of its grant."""

from __future__ import annotations

import json
import socket
import time
from contextlib import closing, suppress
from random import Random
from typing import Any

import pytest
from budget import damaged, examples

np = pytest.importorskip("numpy")

from worker.disaggregation.frames import Done, Failure, FrameCodec, FrameError, Hello, RoomRequest  # noqa: E402
from worker.disaggregation.layout import Buffer, Layout  # noqa: E402
from worker.disaggregation.transfer import GrantKey, Ranges, Region, Writes, open_engine  # noqa: E402
from worker.disaggregation.transfer.channel import Channel, Kind  # noqa: E402
from worker.disaggregation.transfer.sessions import greet  # noqa: E402
from worker.disaggregation.transfer.writing import encode_runs  # noqa: E402

FEW_FRAMES, FEW_SESSIONS = 5000, 150
SIZE = 1 << 16
GRANTED = SIZE // 2
KEY = GrantKey(1, 1)
LAYOUT = Layout(
    page_size=16,
    kv_cache_dtype="float16",
    kv_layout="NHD",
    total_heads=8,
    tp_size=2,
    tp_rank=1,
    start_layer=0,
    kv=[Buffer(4096, 65536, 4096)],
    aux=[Buffer(1 << 21, 64, 8)],
)
MESSAGES: list[Any] = [
    Hello(sender="a", to="b", reply_to="tcp://10.0.0.7:5000", engine="tcp", engine_address=b"\0\1", layout=LAYOUT),
    RoomRequest(
        sender="a",
        to="b",
        reply_to="tcp://10.0.0.7:5000",
        room=1,
        generation=7,
        pages=bytes(16),
        prefix_pages=0,
        aux_index=None,
        dummy=False,
        destinations=1,
        time_left=2.5,
    ),
    Done(sender="a", to="b", room=1, generation=2),
]


@pytest.mark.parametrize("secret", ["", "shared"])
def test_damaged_message_decodes_or_raises_frame_error(secret: str) -> None:
    codec = FrameCodec(secret)
    frames = [codec.encode(message) for message in MESSAGES]
    for random in examples(FEW_FRAMES, 0.5):
        data = damaged(random, random.choice(frames))
        try:
            message = codec.decode(data)
        except FrameError:
            continue
        assert not secret or data in frames  # it is signed
        assert isinstance(message, Hello | RoomRequest | Done | Failure)
        codec.encode(message)


def test_damaged_write_stays_within_its_grant() -> None:
    receiver, sender = open_engine("tcp", "127.0.0.1", None), open_engine("tcp", "127.0.0.1", None)
    try:
        arena, source = receiver.allocate(SIZE), sender.allocate(SIZE)
        receiver.register([Region.of(arena)])
        sender.register([Region.of(source)])
        start = arena.ctypes.data
        receiver.grant(KEY, Ranges(_u8(start), _u8(GRANTED)))
        address = json.loads(receiver.address())
        for random in examples(FEW_SESSIONS):
            runs = [(start + random.randrange(GRANTED), random.randrange(1, 64)) for _ in range(random.randrange(1, 4))]
            _send_damaged(random, (address["host"], address["port"]), runs)
            assert not arena[GRANTED:].any()
        arena[:] = 0
        source[:] = 1
        with closing(sender.connect(receiver.address(), time.monotonic() + 5)) as session:
            session.write(KEY, Writes(_u8(source.ctypes.data), _u8(start), _u8(64)), time.monotonic() + 5)
        assert arena[:64].all()
    finally:
        sender.close()
        receiver.close()


def _send_damaged(random: Random, address: tuple[str, int], runs: list[tuple[int, int]]) -> None:
    """A session whose greeting is right, and whose write is not."""
    channel = Channel(socket.create_connection(address, timeout=60))
    with closing(channel), suppress(OSError):  # it may be cut at any byte
        greet(channel, "tcp", None, time.monotonic() + 5)
        recorder, recorded = socket.socketpair()
        with recorder, recorded:
            connection, channel.socket = channel.socket, recorder
            body = encode_runs(KEY, _u8(*(to for to, _ in runs)), _u8(*(length for _, length in runs)))
            channel.send(Kind.WRITE, body, time.monotonic() + 5)
            frame = recorded.recv(65536)
            channel.socket = connection
        connection.setblocking(True)
        connection.settimeout(30)
        connection.sendall(damaged(random, frame) + b"\7" * sum(length for _, length in runs))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def _u8(*numbers: int) -> Any:
    return np.array(numbers, np.uint64)
