"""Beginnings of sessions: the listener of a receiver, with a thread for each connection, and the handshake.

A handshake agrees on the engine, and proves the secret by both sides, if one is set:

    sender    HELLO      nonce, name of the engine
    receiver  CHALLENGE  nonce, 1 if there is a secret
    sender    PROOF      HMAC-SHA256(secret, "sender", both nonces), or nothing
    receiver  WELCOME    HMAC-SHA256(secret, "receiver", both nonces), or nothing; or REFUSED, with the reason

With a secret, all later frames are signed with keys derived from the secret and both nonces.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from math import inf

from worker.kv_transfer.transfer.channel import Channel, Kind
from worker.kv_transfer.transfer.engine import PeerLostError, RefusedError, TransferError

_NONCE = 32


def greet(channel: Channel, engine: str, secret: bytes | None, deadline: float) -> None:
    """Perform the sender's handshake. Raises RefusedError, PeerLostError and DeadlineError."""
    nonce = secrets.token_bytes(_NONCE)
    channel.send(Kind.HELLO, nonce + engine.encode(), deadline)
    challenge = expect(channel, Kind.CHALLENGE, deadline)
    if len(challenge) != _NONCE + 1:
        raise PeerLostError("the peer's challenge is malformed")
    if challenge[_NONCE] and secret is None:
        raise RefusedError("the peer needs a secret, and this rank has none")
    if not challenge[_NONCE] and secret is not None:
        raise RefusedError("this rank has a secret, and the peer has none")
    nonces = nonce + challenge[:_NONCE]
    channel.send(Kind.PROOF, _proof(secret, b"sender", nonces), deadline)
    welcome = expect(channel, Kind.WELCOME, deadline)
    if not hmac.compare_digest(welcome, _proof(secret, b"receiver", nonces)):
        raise RefusedError("the peer does not know our secret")
    _sign(channel, secret, nonces, b"sender", b"receiver")


def welcome(channel: Channel, engine: str, secret: bytes | None, deadline: float) -> None:
    """Perform the receiver's handshake. Raises RefusedError, PeerLostError and DeadlineError."""
    hello = expect(channel, Kind.HELLO, deadline)
    if len(hello) < _NONCE:
        raise PeerLostError("the peer's hello is malformed")
    theirs = hello[_NONCE:].decode(errors="replace")
    if theirs != engine:
        _refuse(channel, f"the sender uses {theirs}, the receiver {engine}: configure one engine on both", deadline)
    nonce = secrets.token_bytes(_NONCE)
    nonces = hello[:_NONCE] + nonce
    channel.send(Kind.CHALLENGE, nonce + bytes([secret is not None]), deadline)
    proof = expect(channel, Kind.PROOF, deadline)
    if not hmac.compare_digest(proof, _proof(secret, b"sender", nonces)):
        _refuse(channel, "the sender does not know the receiver's secret", deadline)
    channel.send(Kind.WELCOME, _proof(secret, b"receiver", nonces), deadline)
    _sign(channel, secret, nonces, b"receiver", b"sender")


def expect(channel: Channel, kind: Kind, deadline: float = inf) -> bytes:
    """Return the body of the next frame, of this kind. Raises RefusedError, PeerLostError and DeadlineError."""
    received, body = channel.receive(deadline)
    if received is Kind.REFUSED:
        raise RefusedError(body.decode(errors="replace"))
    if received is not kind:
        raise PeerLostError(f"the peer sent {received.name} instead of {kind.name}")
    return body


def _refuse(channel: Channel, reason: str, deadline: float) -> None:
    channel.send(Kind.REFUSED, reason.encode(), deadline)
    raise RefusedError(reason)


def _proof(secret: bytes | None, role: bytes, nonces: bytes) -> bytes:
    return b"" if secret is None else hmac.digest(secret, b"proof of the " + role + nonces, "sha256")


def _sign(channel: Channel, secret: bytes | None, nonces: bytes, ours: bytes, theirs: bytes) -> None:
    if secret is not None:
        channel.sign(*(hmac.digest(secret, b"frames of the " + role + nonces, "sha256") for role in (ours, theirs)))


MOST_SESSIONS = 1024
_GREETING_SECONDS = 5.0
_logger = logging.getLogger(__name__)


class Listener:
    """A listener that serves sessions on its socket until `close`."""

    def __init__(
        self, listening: socket.socket, engine: str, secret: bytes | None, serve: Callable[[Channel], None]
    ) -> None:
        self.socket = listening
        self._engine, self._secret, self._serve = engine, secret, serve
        self._lock = threading.Lock()
        self._sessions: dict[threading.Thread, Channel] = {}
        self._ending: set[threading.Thread] = set()  # cut, to limit the number of sessions
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"transfer-{engine}-accept", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Refuse new sessions, cut existing ones, and wait for their threads. Repeated calls have no effect."""
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            sessions, ending = dict(self._sessions), list(self._ending)
        with suppress(OSError):  # an unusable socket: accept fails either way
            self.socket.shutdown(socket.SHUT_RDWR)
        for channel in sessions.values():
            channel.cut()
        self._thread.join()
        for thread in (*sessions, *ending):
            thread.join()
        self.socket.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self.socket.accept()
            except OSError as error:
                if not self._closing.is_set():
                    _logger.warning("a transfer session could not be accepted: %s", error)
                    self._closing.wait(0.1)  # probably no file descriptor is free
                continue
            try:
                self._admit(connection)
            except (OSError, RuntimeError) as error:  # the connection has ended, or no thread can be started
                connection.close()
                _logger.warning("a transfer session could not begin: %s", error)

    def _admit(self, connection: socket.socket) -> None:
        channel = Channel(connection)
        name = f"transfer-{self._engine}-session"
        thread = threading.Thread(target=self._run, args=(channel,), name=name, daemon=True)
        with self._lock:
            closing = self._closing.is_set()
            if not closing:
                self._make_room()
                thread.start()  # the thread removes itself under this lock
                self._sessions[thread] = channel
        if closing:
            channel.close()

    def _make_room(self) -> None:
        """End one session if MOST_SESSIONS are open, at best one without granted writes. The caller holds the lock."""
        if len(self._sessions) < MOST_SESSIONS:
            return
        least = min(
            self._sessions, key=lambda thread: (self._sessions[thread].landed, self._sessions[thread].idle_since)
        )
        _logger.warning("a transfer session was ended for a new one: %d are open", MOST_SESSIONS)
        self._sessions.pop(least).cut()
        self._ending.add(least)

    def _run(self, channel: Channel) -> None:
        try:
            welcome(channel, self._engine, self._secret, time.monotonic() + _GREETING_SECONDS)
            self._serve(channel)
        except RefusedError as error:
            _logger.warning("a transfer session was refused: %s", error)
        except TransferError as error:
            if not self._closing.is_set():
                _logger.info("a transfer session ended: %s", error)
        finally:
            with self._lock:
                self._sessions.pop(threading.current_thread(), None)
                self._ending.discard(threading.current_thread())
            channel.close()
