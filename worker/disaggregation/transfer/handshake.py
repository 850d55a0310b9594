"""The handshake of a session: agreement on the engine, and proof of the secret by both sides, if one is set.

    sender    HELLO      nonce, name of the engine
    receiver  CHALLENGE  nonce, 1 if there is a secret
    sender    PROOF      HMAC-SHA256(secret, "sender", both nonces), or nothing
    receiver  WELCOME    HMAC-SHA256(secret, "receiver", both nonces), or nothing; or REFUSED, with the reason

With a secret, all later frames are signed with keys derived from the secret and both nonces.
"""

from __future__ import annotations

import hmac
import secrets
from math import inf

from worker.disaggregation.transfer.channel import Channel, Kind
from worker.disaggregation.transfer.engine import PeerLostError, RefusedError

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
