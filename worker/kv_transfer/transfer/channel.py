"""Frames over a socket: a versioned little-endian header, a body, an optional signature, then raw payload.

    magic "KVTX" | version u16 | kind u16 | length of the body u32 | body | signature, 16 bytes (signed sessions)

A signature covers header, body and the number of previous frames. The payload is not signed, but the ranges that it may
overwrite are.
"""

from __future__ import annotations

import hashlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import IntEnum
from math import ceil, inf

from worker.kv_transfer.transfer.engine import DeadlineError, PeerLostError

VERSION = 1
MOST_BODY = 1 << 20  # bytes of memory that an unauthenticated peer can use
_MAGIC = b"KVTX"
_HEADER = struct.Struct("<4sHHI")
_SEQUENCE = struct.Struct("<Q")
_SIGNATURE = 16
_IOV_MAX = 1024
_READ = 1 << 20  # bytes of one system call, about; more buffers than it fills are wasted work
_WORTH = 1 << 19  # bytes that are enough to wake up and read
SILENCE_SECONDS = 60.0  # seconds of silence during a payload or an answer, after which a peer is lost
_LONGEST = 3600.0  # seconds one system call may wait
_TIMEVAL = struct.Struct("@ll")


class Kind(IntEnum):
    """The kind of a frame."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSED = 5
    WRITE = 6
    LANDED = 7
    MEMORY = 8
    BEGIN = 9
    GRANTED = 10
    DONE = 11


class Channel:
    """One connection. One thread sends and one thread receives; any thread may call `cut`."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)  # sending blocks for SO_SNDTIMEO at most; reading never blocks
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _keep_alive(connection)
        self.socket = connection
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
        self._wanted = 1
        self._send_key = self._receive_key = b""
        self._sent = self._received = 0
        self.landed = False  # whether the peer wrote granted bytes
        self.idle_since = time.monotonic()  # when the peer's last frame was answered

    def sign(self, send_key: bytes, receive_key: bytes) -> None:
        """Sign and check all following frames."""
        self._send_key, self._receive_key = send_key, receive_key

    def send(self, kind: Kind, body: bytes = b"", deadline: float = inf, payload: Sequence[memoryview] = ()) -> None:
        """Send a frame and its payload. Raises PeerLostError and DeadlineError."""
        frame = _HEADER.pack(_MAGIC, VERSION, kind, len(body)) + body
        if self._send_key:
            frame += _signature(self._send_key, self._sent, frame)
        self._sent += 1
        self._send_all([memoryview(frame), *payload], deadline)

    def receive(self, deadline: float = inf) -> tuple[Kind, bytes]:
        """Return the next frame. Raises PeerLostError, also for a malformed frame, and DeadlineError."""
        header = self._receive_exactly(_HEADER.size, deadline)
        magic, version, kind, length = _HEADER.unpack(header)
        if magic != _MAGIC:
            raise PeerLostError("the peer does not speak the transfer protocol")
        if version != VERSION:
            raise PeerLostError(f"the peer has version {version} of the transfer protocol, this rank has {VERSION}")
        if kind not in Kind.__members__.values():
            raise PeerLostError(f"the peer sent a frame of unknown kind {kind}")
        if length > MOST_BODY:
            raise PeerLostError(f"the peer sent a frame of {length} bytes; at most {MOST_BODY} are allowed")
        signature = _SIGNATURE if self._receive_key else 0
        rest = self._receive_exactly(length + signature, deadline)
        body = rest[:length]
        if self._receive_key:
            expected = _signature(self._receive_key, self._received, header + body)
            if not hmac.compare_digest(expected, rest[length:]):
                raise PeerLostError("the peer sent a frame with a wrong signature")
        self._received += 1
        return Kind(kind), body

    def read_now(self, buffers: Buffers) -> None:
        """Fill buffers with received bytes, without blocking. Raises PeerLostError."""
        try:
            count = self.socket.recvmsg_into(buffers.next(_READ), 0, socket.MSG_DONTWAIT)[0]
        except BlockingIOError:
            return
        except OSError as error:
            raise _lost(error) from None
        if not count:
            raise PeerLostError("the peer closed the connection")
        buffers.advance(count)

    def wait_readable(self, deadline: float = inf, most: int = 1) -> None:
        """Wait until bytes arrive, and for `most` expected ones, enough for an efficient read. Raises DeadlineError."""
        wanted = _WORTH if most >= _WORTH else 1
        if wanted != self._wanted:
            self._wanted = wanted
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)
        while not self._readable.poll(_milliseconds(_left(deadline))):
            pass

    def discard(self, count: int) -> None:
        """Read and drop `count` bytes. Raises PeerLostError, and DeadlineError if the peer is silent."""
        scratch = memoryview(bytearray(min(count, 1 << 18)))
        while count:
            buffers = Buffers([scratch[: min(count, len(scratch))]])
            before = buffers.left
            self.read_now(buffers)
            if buffers.left == before:
                self.wait_readable(time.monotonic() + SILENCE_SECONDS)
            count -= before - buffers.left

    def answer(self, kind: Kind, body: bytes = b"") -> None:
        """Answer a write of the peer, as landed unless `kind` is REFUSED. Raises as `send` does."""
        self.landed = self.landed or kind is not Kind.REFUSED
        self.idle_since = time.monotonic()
        self.send(kind, body, self.idle_since + SILENCE_SECONDS)

    def cut(self) -> None:
        """End the connection for all its users."""
        with suppress(OSError):  # the connection has already ended
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. The connection must not be used afterwards."""
        self.cut()
        self.socket.close()

    def _send_all(self, views: list[memoryview], deadline: float) -> None:
        buffers = Buffers(views)
        while buffers.left:
            timeout = _TIMEVAL.pack(*divmod(ceil(min(_left(deadline), _LONGEST) * 1e6), 1_000_000))
            try:
                self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)
                buffers.advance(self.socket.sendmsg(buffers.next(buffers.left)))
            except BlockingIOError:
                continue  # the time is up, or nearly
            except OSError as error:
                raise _lost(error) from None

    def _receive_exactly(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        buffers = Buffers([memoryview(data)])
        while buffers.left:
            before = buffers.left
            self.read_now(buffers)
            if buffers.left == before:
                self.wait_readable(deadline)
        return bytes(data)


class Buffers:
    """Buffers that are filled or sent in order, in several steps."""

    def __init__(self, views: list[memoryview]) -> None:
        self._views = views
        self._index = 0
        self.left = sum(map(len, views))
        """Remaining bytes."""
        self._average = max(1, self.left // max(1, len(views)))

    def next(self, size: int) -> list[memoryview]:
        """Return the next buffers, with about `size` bytes."""
        return self._views[self._index : self._index + max(1, min(_IOV_MAX, size // self._average))]

    def advance(self, count: int) -> None:
        """Mark `count` bytes as done."""
        self.left -= count
        views, index = self._views, self._index
        while count and count >= len(views[index]):
            count -= len(views[index])
            index += 1
        if count:
            views[index] = views[index][count:]
        self._index = index


def _signature(key: bytes, number: int, frame: bytes) -> bytes:
    return hashlib.blake2b(_SEQUENCE.pack(number) + frame, key=key, digest_size=_SIGNATURE).digest()


def _left(deadline: float) -> float:
    """Return the seconds until a deadline, above 0. Raises DeadlineError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("the peer did not answer within the deadline")
    return left


def _milliseconds(seconds: float) -> int:
    return ceil(min(seconds, _LONGEST) * 1000)


def _keep_alive(connection: socket.socket) -> None:
    """Set options that detect within half a minute that the peer's host is down."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _lost(error: OSError) -> PeerLostError:
    return PeerLostError(f"the connection to the peer broke: {error.strerror or error}")
