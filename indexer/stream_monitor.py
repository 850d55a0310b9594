"""What becomes of a socket's attempts to connect: agreement with the other side, or not, and why."""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

_REASONS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the stream is encrypted on one side only, or something else listens there",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know this subscriber's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hangs up, as one does whose stream is encrypted otherwise, or not at all",
}


@dataclass(frozen=True, slots=True)
class Connected:
    """The other side was reached and speaks the same language."""


@dataclass(frozen=True, slots=True)
class Reached:
    """Something accepts connections there; it has said nothing yet."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The other side is gone. It is tried again."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The other side was reached, and that was all. `final`: it said why, and ZeroMQ will not try again by itself; else
    it hung up, or said nothing for long."""

    reason: str
    final: bool


Happened = Connected | Reached | Disconnected | Refused
_OTHERS: dict[int, Happened] = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Connected(),
    zmq.EVENT_CONNECTED: Reached(),
    zmq.EVENT_DISCONNECTED: Disconnected(),
}


def monitor_of(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that tells how connecting goes, for `read_monitor`."""
    events = 0
    for event in (*_OTHERS, *_REASONS):
        events |= event
    return socket.get_monitor_socket(events)


def read_monitor(monitor: zmq.Socket[bytes]) -> Happened:
    """The next thing that happened; there must be one."""
    event = int(recv_monitor_message(monitor)["event"])
    if (happened := _OTHERS.get(event)) is not None:
        return happened
    return Refused(_REASONS[event], event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
