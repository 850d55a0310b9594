"""The common base of all engines: registered memory, grants, a listener for senders, and sessions to receivers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvevents.decoding import read_json
from worker.kv_transfer.transfer.channel import Channel
from worker.kv_transfer.transfer.engine import (
    DeadlineError,
    GrantKey,
    PeerLostError,
    Quiescence,
    RefusedError,
    Region,
    Session,
)
from worker.kv_transfer.transfer.grants import Grants, check_key
from worker.kv_transfer.transfer.memory import Memory, array_at, new_array
from worker.kv_transfer.transfer.runs import Ranges, Writes
from worker.kv_transfer.transfer.sessions import Listener, greet


class Address(msgspec.Struct, frozen=True):
    """The address of an engine. Without a port, `host` is the name of a local socket."""

    engine: str
    host: str
    port: int | None = None


class Writer(Protocol):
    """The write operation of an engine, with its connection."""

    def write(self, key: GrantKey, writes: Writes, deadline: float) -> None:
        """Write as Session.write does. After a RefusedError, the connection can still be used."""
        ...

    def end(self) -> None:
        """Abort a waiting write, and end the connection once it is unused. May be called from any thread."""
        ...

    def close(self) -> None:
        """Free the connection, after `end`."""
        ...


class Endpoint:
    """A base of engines, which add how bytes move."""

    name = ""

    def __init__(self, listening: socket.socket, secret: bytes | None) -> None:
        if secret is not None and not secret:
            listening.close()
            raise ValueError("the secret is empty: omit it or set one")
        self._secret = secret
        self.memory = Memory()
        self.grants = Grants(self.memory)
        self._lock = threading.Lock()
        self._sessions: set[ChannelSession] = set()
        self._closed = False
        self._listener = Listener(listening, self.name, secret, self._serve)

    def allocate(self, length: int) -> NDArray[np.uint8]:
        """Allocate as TransferEngine.allocate does."""
        return new_array(length)

    def register(self, regions: Sequence[Region]) -> None:
        """Register as TransferEngine.register does."""
        for region in regions:
            if region.pointer <= 0 or region.length <= 0:
                raise ValueError(f"{region}: a region has an address and a length above 0")
        self.memory.add((region.pointer, array_at(region.pointer, region.length)) for region in regions)

    def address(self) -> bytes:
        """Return the address, as TransferEngine.address does."""
        return msgspec.json.encode(self._address())

    def connect(self, peer: bytes, deadline: float) -> Session:
        """Connect as TransferEngine.connect does."""
        try:
            address = read_json(peer, Address)
        except msgspec.DecodeError as error:
            raise PeerLostError(f"invalid address of a transfer engine: {error}") from None
        if address.engine != self.name:
            raise RefusedError(f"the peer uses {address.engine}, this rank {self.name}: configure one engine on both")
        channel = Channel(dial(address, deadline))
        try:
            greet(channel, self.name, self._secret, deadline)
            session = ChannelSession(self._writer(channel, deadline), self._sessions.discard)
        except BaseException:
            channel.close()
            raise
        with self._lock:
            closed = self._closed
            self._sessions.add(session)
        if closed:
            session.close()
            raise PeerLostError("this engine was closed")
        return session

    def grant(self, key: GrantKey, ranges: Ranges) -> None:
        """Grant as TransferEngine.grant does."""
        self.grants.add(key, ranges)

    def revoke(self, key: GrantKey, deadline: float) -> Quiescence:
        """Revoke as TransferEngine.revoke does."""
        return self.grants.revoke(key, deadline)

    def close(self) -> None:
        """Close as TransferEngine.close does."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.close()
        self._listener.close()

    def _address(self) -> Address:
        host, port, *_ = self._listener.socket.getsockname()
        return Address(self.name, host, port)

    def _serve(self, channel: Channel) -> None:
        raise NotImplementedError

    def _writer(self, channel: Channel, deadline: float) -> Writer:
        raise NotImplementedError


class ChannelSession:
    """A session over one connection. Writes run one after another; the first that breaks the connection ends it."""

    def __init__(self, writer: Writer, forget: Callable[[ChannelSession], None]) -> None:
        self._writer, self._forget = writer, forget
        self._turn = threading.Lock()
        self._ended = False

    def write(self, key: GrantKey, writes: Writes, deadline: float) -> None:
        """Write as Session.write does."""
        check_key(key)
        if not self._turn.acquire(timeout=max(0, deadline - time.monotonic())):
            raise DeadlineError("other writes to the peer lasted until the deadline")
        try:
            if self._ended:
                raise PeerLostError("the session has ended")
            try:
                self._writer.write(key, writes, deadline)
            except (PeerLostError, DeadlineError):
                self._ended = True
                self._writer.end()
                raise
        finally:
            self._turn.release()

    def close(self) -> None:
        """Close as Session.close does."""
        self._ended = True
        self._writer.end()
        with self._turn:
            self._writer.close()
        self._forget(self)


def listen(host: str, port: int = 0) -> socket.socket:
    """Return a listening TCP socket, IPv4 or IPv6. Raises ValueError for an address that peers cannot connect to."""
    if host in {"", "0.0.0.0", "::", "*"}:
        raise ValueError(f"host: {host!r} is not an address that peers can connect to; set one of this machine")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=128)
    except OSError as error:
        raise ValueError(f"host: can't listen on {host!r}: {error}") from None


def dial(address: Address, deadline: float) -> socket.socket:
    """Return a connection to an address. Raises PeerLostError and DeadlineError."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise DeadlineError("no time was left to connect to the peer")
    try:
        if address.port is not None:
            return socket.create_connection((address.host, address.port), timeout=left)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(left)
            connection.connect("\0" + address.host)
        except BaseException:
            connection.close()
            raise
        return connection
    except TimeoutError:
        raise DeadlineError(f"{address.host} did not answer within the deadline") from None
    except (OSError, ValueError) as error:
        raise PeerLostError(f"can't connect to {address.host}: {error}") from None
