"""Receiving from ZeroMQ's sockets, without waiting for anything.

pyzmq gives Python's lock away with each frame, and asking a socket for an option takes longer than a frame: a `Frame`
tells by itself whether more of its message follows.
"""

from __future__ import annotations

from contextlib import suppress

import zmq

# As numbers: every message asks for them, and members of an enumeration cost more than what they stand for.
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)

# From one socket before the others have their turn.
MESSAGES_A_TURN = 64
_BYTES_A_TURN = 64 << 10
# What a socket's queue may take. ZeroMQ counts messages, so how many that is follows from the largest one that came;
# beyond it the publisher has to keep them, or drops some, and the gap is replayed.
_RECEIVE_BYTES = 16 << 20
USUAL_MESSAGE = 4 << 10  # bytes
_LARGEST_MESSAGE = 16 << 20  # bytes: ZeroMQ hangs up on a publisher of larger ones


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """A message; None when there is none."""
    try:
        return _message(socket)
    except zmq.Again:
        return None


def receive_run(socket: zmq.Socket[bytes]) -> tuple[list[list[bytes]], bool]:
    """A turn's messages. And whether nothing is left."""
    size = 0
    messages: list[list[bytes]] = []
    try:
        while len(messages) < MESSAGES_A_TURN and size < _BYTES_A_TURN:
            parts = _message(socket)
            messages.append(parts)
            if not size and not has_some(socket):  # often there is one; asking takes less than the exception
                return messages, True
            size += sum(map(len, parts))
    except zmq.Again:
        return messages, True
    return messages, False


def _message(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Raises zmq.Again when there is none."""
    frame = socket.recv(_NOBLOCK, False)
    parts = [frame.bytes]
    while frame.more:
        frame = socket.recv(_NOBLOCK, False)
        parts.append(frame.bytes)
    return parts


def has_some(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message has come."""
    return bool(int(socket.get(_EVENTS)) & _POLLIN)


def discard(socket: zmq.Socket[bytes] | None) -> None:
    """Throw away what a publisher may have replayed in an earlier life; it is asked again."""
    while socket is not None and receive(socket) is not None:
        pass


def bound_queue(socket: zmq.Socket[bytes], message: int) -> None:
    """Let a socket receive as many messages of a size as its queue may take."""
    socket.setsockopt(zmq.RCVHWM, max(_RECEIVE_BYTES // message, 1))
    socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Find out within some fifteen seconds that a machine at the other end is gone.

    By the kernels, not by ZeroMQ's heartbeats: those give up a connection whose queue is full, since no answer is read
    behind what waits, and libzmq 4.3.5 may end the process over the next connection (its issue 3937).
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)


def connect(socket: zmq.Socket[bytes], endpoint: str, field_name: str) -> None:
    """Connect a socket. Raises ValueError, naming the field that the endpoint is from, when that can't be."""
    try:
        # With it, a name that has an IPv6 address is reached there only, and engines listen on IPv4.
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(
            f"{field_name}: cannot connect to {endpoint!r} ({error}); expected e.g. tcp://127.0.0.1:5557"
        ) from error


def connect_again(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Connect a socket anew."""
    with suppress(zmq.ZMQError):  # ZeroMQ may have forgotten it
        socket.disconnect(endpoint)
    socket.connect(endpoint)
