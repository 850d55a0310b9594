"""Frames of an unknown peer to a TCP engine: they end its session, land nothing, and do not affect other peers."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transfer_peer import wait_until

from worker.kv_transfer.transfer import (
    GrantKey,
    PeerLostError,
    Quiescence,
    Ranges,
    RefusedError,
    Region,
    TransferEngine,
    Writes,
    open_engine,
    sessions,
    tcp,
    writing,
)
from worker.kv_transfer.transfer import channel as channels
from worker.kv_transfer.transfer.channel import MOST_BODY, Channel, Kind
from worker.kv_transfer.transfer.sessions import expect, greet
from worker.kv_transfer.transfer.writing import MOST_BYTES, encode_runs

SECRET = b"known to few"
SIZE = 1 << 20
KEY = GrantKey(1, 1)


class Party:
    """An engine and its arena."""

    def __init__(self, name: str = "tcp", secret: bytes | None = SECRET, host: str = "127.0.0.1") -> None:
        self.engine: TransferEngine = open_engine(name, host, secret)
        self.arena = self.engine.allocate(SIZE)
        self.engine.register([Region.of(self.arena)])
        self.pointer = self.arena.ctypes.data

    def grant(self, key: GrantKey) -> None:
        self.engine.grant(key, Ranges(_u8(self.pointer), _u8(SIZE)))

    def send(self, to: Party, key: GrantKey, length: int = 64) -> None:
        """Write the start of our arena to the start of the peer's."""
        session = self.engine.connect(to.engine.address(), time.monotonic() + 60)
        with closing(session):
            session.write(key, Writes(_u8(self.pointer), _u8(to.pointer), _u8(length)), time.monotonic() + 60)


def _u8(*numbers: int) -> Any:
    return np.array(numbers, np.uint64)


@pytest.fixture(scope="module")
def parties() -> Iterator[tuple[Party, Party]]:
    receiver, sender = Party(), Party()
    sender.arena[:] = 1
    receiver.grant(KEY)
    yield receiver, sender
    sender.engine.close()
    receiver.engine.close()


@pytest.fixture
def receiver(parties: tuple[Party, Party]) -> Iterator[Party]:
    """Nothing may land in it but what a proper sender sends afterwards."""
    receiver, sender = parties
    receiver.arena[:] = 0
    yield receiver
    assert not receiver.arena.any()
    sender.send(receiver, KEY)
    assert receiver.arena[:64].all()


def _dial(receiver: Party) -> socket.socket:
    address = json.loads(receiver.engine.address())
    return socket.create_connection((address["host"], address["port"]), timeout=60)


def _session(receiver: Party) -> Channel:
    """Open a session that knows the secret, and can send any bytes."""
    channel = Channel(_dial(receiver))
    greet(channel, "tcp", SECRET, time.monotonic() + 60)
    return channel


def _is_cut(connection: socket.socket) -> bool:
    """Return whether the peer ends the connection."""
    connection.settimeout(60)
    with suppress(ConnectionError):
        while connection.recv(4096):
            pass
    return True


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: kv\r\n\r\n", id="another protocol"),
        pytest.param(struct.pack("<4sHHI", b"KVTX", 9, Kind.HELLO, 0), id="another version"),
        pytest.param(struct.pack("<4sHHI", b"KVTX", 1, 999, 0), id="unknown kind"),
        pytest.param(struct.pack("<4sHHI", b"KVTX", 1, Kind.HELLO, MOST_BODY + 1), id="oversized"),
        pytest.param(struct.pack("<4sHHI", b"KVTX", 1, Kind.HELLO, 4) + b"abcd", id="short hello"),
        pytest.param(struct.pack("<4sHHI", b"KVTX", 1, Kind.WRITE, 0), id="write before the handshake"),
        pytest.param(struct.pack(">4sHHI", b"KVTX", 1, Kind.HELLO, 40) + bytes(40), id="big endian"),
    ],
)
def test_malformed_frame_ends_session(receiver: Party, sent: bytes) -> None:
    with _dial(receiver) as connection:
        connection.sendall(sent)
        assert _is_cut(connection)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sent=st.binary(max_size=200))
def test_random_bytes_end_session(receiver: Party, sent: bytes) -> None:
    with _dial(receiver) as connection, suppress(OSError):  # it may be cut at any byte
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        assert _is_cut(connection)


def _body(count: int, *numbers: int) -> bytes:
    return struct.pack("<QQI", *KEY, count) + struct.pack(f"<{len(numbers)}Q", *numbers)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"", id="empty"),
        pytest.param(_body(0), id="no runs"),
        pytest.param(_body(2, 1, 1), id="fewer than it says"),
        pytest.param(_body(1, 1, 1, 1), id="more than it says"),
        pytest.param(_body((1 << 32) - 1, 1, 1), id="far more than allowed"),
        pytest.param(_body(1, 1, 0), id="an empty run"),
        pytest.param(_body(1, 1, MOST_BYTES + 1), id="too long a run"),
        pytest.param(_body(2, 1, 1, (1 << 64) - 1, 2), id="lengths that overflow"),
        pytest.param(_body(2, 1, 1, MOST_BYTES, 1), id="too many bytes"),
    ],
)
def test_malformed_write_ends_session(receiver: Party, body: bytes) -> None:
    with closing(_session(receiver)) as channel:
        channel.send(Kind.WRITE, body, time.monotonic() + 60)
        with pytest.raises(PeerLostError):
            channel.receive(time.monotonic() + 60)


def test_unexpected_frame_kind_ends_session(receiver: Party) -> None:
    with closing(_session(receiver)) as channel:
        channel.send(Kind.LANDED, b"", time.monotonic() + 60)
        with pytest.raises(PeerLostError):
            channel.receive(time.monotonic() + 60)


@pytest.mark.parametrize("key", [b"a wrong key", b""], ids=["wrongly signed", "not signed"])
def test_frame_needs_signature(receiver: Party, key: bytes) -> None:
    with closing(_session(receiver)) as channel:
        channel.sign(key, key)
        payload = [memoryview(bytes([9] * 64))]
        channel.send(Kind.WRITE, encode_runs(KEY, _u8(receiver.pointer), _u8(64)), time.monotonic() + 60, payload)
        assert _is_cut(_blocking(channel))


def test_repeated_frame_is_rejected(receiver: Party) -> None:
    """A signed frame cannot be repeated."""
    with closing(_session(receiver)) as channel:
        recorder, recorded = socket.socketpair()
        with recorder, recorded:
            connection, channel.socket = channel.socket, recorder
            channel.send(Kind.WRITE, encode_runs(KEY, _u8(receiver.pointer), _u8(1)), time.monotonic() + 60)
            frame = recorded.recv(4096)
            channel.socket = connection
        connection.setblocking(True)
        connection.sendall(frame + b"\0")
        channel.socket.setblocking(False)
        expect(channel, Kind.LANDED, time.monotonic() + 60)
        connection.setblocking(True)
        connection.sendall(frame + b"\1")
        assert _is_cut(connection)


def _blocking(channel: Channel) -> socket.socket:
    channel.socket.setblocking(True)
    return channel.socket


def test_bytes_after_revocation_do_not_land(parties: tuple[Party, Party]) -> None:
    """A grant is revoked between two halves of a frame, and the page is reused before the second half arrives."""
    receiver, _ = parties
    receiver.arena[:] = 0
    key = GrantKey(50, 1)
    receiver.grant(key)
    with closing(_session(receiver)) as channel:
        channel.send(Kind.WRITE, encode_runs(key, _u8(receiver.pointer), _u8(SIZE)), time.monotonic() + 60)
        connection = _blocking(channel)
        connection.sendall(b"\7" * (SIZE // 2))
        wait_until(lambda: receiver.arena[0] == 7)  # the rest of the half may wait for more
        assert receiver.engine.revoke(key, time.monotonic() + 60) is Quiescence.QUIESCENT
        receiver.arena[:] = 5
        connection.sendall(b"\7" * (SIZE // 2))
        connection.setblocking(False)
        with pytest.raises(RefusedError, match="was revoked"):
            expect(channel, Kind.LANDED, time.monotonic() + 60)
        assert (receiver.arena == 5).all()
        channel.send(
            Kind.WRITE, encode_runs(KEY, _u8(receiver.pointer), _u8(1)), time.monotonic() + 60, [memoryview(b"\6")]
        )
        expect(channel, Kind.LANDED, time.monotonic() + 60)  # the session serves other rooms
    assert receiver.arena[:2].tolist() == [6, 5]


def test_slow_peer_delays_only_itself(parties: tuple[Party, Party]) -> None:
    receiver, sender = parties
    with closing(_session(receiver)) as slow, closing(_dial(receiver)):  # one in a frame, one in the handshake
        slow.send(Kind.WRITE, encode_runs(KEY, _u8(receiver.pointer + 4096), _u8(4096)), time.monotonic() + 60)
        receiver.arena[:] = 0
        sender.send(receiver, KEY)
        assert receiver.arena[:64].all()


def test_transfer_works_over_ipv6() -> None:
    try:
        receiver = Party(host="::1")
    except ValueError as error:
        pytest.skip(str(error))
    sender = Party(host="::1")
    sender.arena[:] = 1
    receiver.grant(KEY)
    sender.send(receiver, KEY)
    assert receiver.arena[:64].all()
    sender.engine.close()
    receiver.engine.close()


def test_revocation_between_frames_refuses_rest_of_write(parties: tuple[Party, Party]) -> None:
    """A write of several frames is refused as a whole, and the session is still in step."""
    receiver, _ = parties
    big = np.ones(3 * MOST_BYTES, np.uint8)
    sender = Party()
    sender.engine.register([Region.of(big)])
    session = sender.engine.connect(receiver.engine.address(), time.monotonic() + 60)
    starts = _u8(*range(big.ctypes.data, big.ctypes.data + big.size, SIZE))
    to = np.full(len(starts), receiver.pointer, np.uint64)
    with pytest.raises(RefusedError, match="has no grant"):
        session.write(GrantKey(99, 1), Writes(starts, to, np.full(len(starts), SIZE, np.uint64)), time.monotonic() + 60)
    session.write(KEY, Writes(_u8(big.ctypes.data), _u8(receiver.pointer), _u8(1)), time.monotonic() + 60)
    sender.engine.close()


def test_idle_sessions_are_replaced_by_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maximal sessions without a secret: a proper sender is served, and a session with a write is kept."""
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 32)
    receiver, sender = Party(secret=None), Party(secret=None)
    strangers: list[Channel] = []
    try:
        receiver.grant(KEY)
        with closing(sender.engine.connect(receiver.engine.address(), time.monotonic() + 60)) as kept:
            writes = Writes(_u8(sender.pointer), _u8(receiver.pointer), _u8(64))
            kept.write(KEY, writes, time.monotonic() + 60)
            for _ in range(100):
                channel = Channel(_dial(receiver))
                strangers.append(channel)
                greet(channel, "tcp", None, time.monotonic() + 60)
            kept.write(KEY, writes, time.monotonic() + 60)
        sender.send(receiver, KEY)
    finally:
        for channel in strangers:
            channel.close()
        sender.engine.close()
        receiver.engine.close()


def test_session_without_write_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FIRST_WRITE_SECONDS", 0.2)
    monkeypatch.setattr(channels, "SILENCE_SECONDS", 0.2)
    monkeypatch.setattr(tcp, "SILENCE_SECONDS", 0.2)
    receiver = Party()
    try:
        receiver.grant(KEY)
        nothing, half, refused = _session(receiver), _session(receiver), _session(receiver)
        half.send(Kind.WRITE, encode_runs(KEY, _u8(receiver.pointer), _u8(4096)))
        refused.send(Kind.WRITE, encode_runs(GrantKey(9, 9), _u8(receiver.pointer), _u8(4096)))
        for channel in (nothing, half, refused):
            assert _is_cut(channel.socket)
            channel.close()
    finally:
        receiver.engine.close()
