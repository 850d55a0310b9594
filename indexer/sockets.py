"""ZeroMQ sockets of event streams: options, connections, receiving without blocking, polling, connection events.

pyzmq releases Python's lock for each frame, and asking a socket for an option takes longer than receiving a frame. So
messages are received with `recv`, whose `Frame` objects know whether more of their message follows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from selectors import EVENT_READ, DefaultSelector

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

log = structlog.get_logger()

# Plain integers, because each message needs them and members of an enumeration are slow to use.
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)

# Limits of one socket's turn, before other sockets have theirs.
MESSAGES_A_TURN = 64
_BYTES_A_TURN = 64 << 10
_SECONDS_A_TURN = 0.005
# Maximum bytes in a socket's receive queue. ZeroMQ counts messages, so the limit in messages follows from the largest
# message received. Beyond it the publisher keeps or drops messages, and a replay closes the gap.
_RECEIVE_BYTES = 16 << 20
USUAL_MESSAGE = 4 << 10  # bytes
_LARGEST_MESSAGE = 16 << 20  # bytes; ZeroMQ closes the connection of a publisher with larger messages


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """Receive a message; None if the queue is empty."""
    try:
        return _receive_message(socket)
    except zmq.Again:
        return None


def receive_run(socket: zmq.Socket[bytes]) -> tuple[list[list[bytes]], bool]:
    """Receive the messages of one turn. Returns them, and whether the queue is empty now."""
    size = 0
    messages: list[list[bytes]] = []
    try:
        while len(messages) < MESSAGES_A_TURN and size < _BYTES_A_TURN:
            parts = _receive_message(socket)
            messages.append(parts)
            if not size and not has_message(socket):  # one message is common, and asking is cheaper than the exception
                return messages, True
            size += sum(map(len, parts))
    except zmq.Again:
        return messages, True
    return messages, False


def _receive_message(socket: zmq.Socket[bytes]) -> list[bytes]:
    """Receive a message. Raises zmq.Again if the queue is empty."""
    frame = socket.recv(_NOBLOCK, False)
    parts = [frame.bytes]
    while frame.more:
        frame = socket.recv(_NOBLOCK, False)
        parts.append(frame.bytes)
    return parts


def has_message(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message waits in the queue."""
    return bool(int(socket.get(_EVENTS)) & _POLLIN)


def discard_messages(socket: zmq.Socket[bytes] | None) -> None:
    """Receive and drop all waiting messages. Does nothing without a socket."""
    while socket is not None and receive(socket) is not None:
        pass


def limit_queue(socket: zmq.Socket[bytes], message: int) -> None:
    """Limit a socket's receive queue to a fixed number of bytes, for messages of `message` bytes."""
    socket.setsockopt(zmq.RCVHWM, max(_RECEIVE_BYTES // message, 1))
    socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_MESSAGE)


def keep_alive(socket: zmq.Socket[bytes]) -> None:
    """Turn on TCP keepalive, which closes the connection about 15 seconds after the other machine disappears.

    ZeroMQ's heartbeats are no alternative. They close a connection whose queue is full, because no reply is read behind
    the waiting messages. On the next connection libzmq 4.3.5 may then abort the process (its issue 3937).
    """
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 2)


def connect(socket: zmq.Socket[bytes], endpoint: str, field_name: str) -> None:
    """Connect a socket. Raises ValueError, whose text begins with `field_name`, if the endpoint is unusable."""
    try:
        # With IPV6 set, a name with an IPv6 address is reached only there, while engines listen on IPv4.
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(
            f"{field_name}: cannot connect to {endpoint!r} ({error}); expected e.g. tcp://127.0.0.1:5557"
        ) from error


def reconnect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Close a socket's connection to an endpoint, if there is one, and connect again."""
    with suppress(zmq.ZMQError):  # ZeroMQ may have dropped the endpoint already
        socket.disconnect(endpoint)
    socket.connect(endpoint)


class SocketPoller:
    """Sockets with a handler each, of which only those with messages are read.

    A file descriptor of ZeroMQ reports a message only once. So a socket stays ready until it is drained, and `recheck`
    makes it ready after its notification was consumed.
    """

    def __init__(self) -> None:
        self._selector = DefaultSelector()
        self._handlers: dict[zmq.Socket[bytes], Callable[[], bool]] = {}
        self._ready: dict[zmq.Socket[bytes], None] = {}

    def fileno(self) -> int:
        """Return a file descriptor that is readable while any socket reports a message."""
        return self._selector.fileno()

    @property
    def ready(self) -> bool:
        """True if any socket is known to have messages."""
        return bool(self._ready)

    def add(self, socket: zmq.Socket[bytes], read: Callable[[], bool]) -> None:
        """Add a socket. `read` handles one message and returns False if no message is waiting."""
        self._handlers[socket] = read
        self._selector.register(int(socket.fd), EVENT_READ, socket)
        self.recheck(socket)  # its first notification may have been sent already

    def remove(self, socket: zmq.Socket[bytes]) -> None:
        """Remove a socket, which must still be open."""
        self._selector.unregister(int(socket.fd))
        del self._handlers[socket]
        self._ready.pop(socket, None)

    def recheck(self, socket: zmq.Socket[bytes]) -> None:
        """Read a socket at the next opportunity, whether it reports a message or not."""
        self._ready[socket] = None

    def poll(self) -> bool:
        """Note the sockets that report a message. Returns whether any socket is ready."""
        for key, _ in self._selector.select(0):
            self._ready[key.data] = None
        return bool(self._ready)

    def read(self) -> None:
        """Give each ready socket a turn. An exception of a handler is logged, and the other sockets are still read."""
        for socket in list(self._ready):
            if (handler := self._handlers.get(socket)) is None:  # an earlier handler removed the socket
                continue
            try:
                if _drain(handler):
                    self._ready.pop(socket, None)
            except Exception:
                log.exception("a message could not be handled")

    def close(self) -> None:
        """Close the selector. The sockets stay open."""
        self._selector.close()


def _drain(read: Callable[[], bool]) -> bool:
    """Handle the messages of one turn. Returns whether the queue is empty now."""
    end = time.monotonic() + _SECONDS_A_TURN
    for _ in range(MESSAGES_A_TURN):
        if not read():
            return True
        if time.monotonic() > end:
            break
    return False


@dataclass(frozen=True, slots=True)
class Connected:
    """Connection event: the handshake with the publisher succeeded."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Connection event: the address accepted a TCP connection; the handshake follows."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Connection event: the connection closed. ZeroMQ tries again."""


@dataclass(frozen=True, slots=True)
class HandshakeFailed:
    """Connection event: the handshake failed. `final`: the publisher gave a reason, so ZeroMQ does not try again."""

    reason: str
    final: bool


ConnectionEvent = Connected | Reached | Disconnected | HandshakeFailed

_FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the stream is encrypted on one side only, or the port has another protocol",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "the publisher does not know this subscriber's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: (
        "the publisher closes the connection: its stream may be encrypted with another key, or not at all"
    ),
}
_OTHER_EVENTS: dict[int, ConnectionEvent] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Connected(),
    zmq.EVENT_CONNECTED: Reached(),
    zmq.EVENT_DISCONNECTED: Disconnected(),
}


def monitor_of(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Return a socket that receives the connection events of another one, for `read_monitor`."""
    events = 0
    for event in (*_OTHER_EVENTS, *_FAILURES):
        events |= event
    return socket.get_monitor_socket(events)


def read_monitor(monitor: zmq.Socket[bytes]) -> ConnectionEvent:
    """Receive the next connection event, which must be there already."""
    number = int(recv_monitor_message(monitor)["event"])
    if (event := _OTHER_EVENTS.get(number)) is not None:
        return event
    return HandshakeFailed(_FAILURES[number], number != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
