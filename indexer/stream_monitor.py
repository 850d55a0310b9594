"""What becomes of a socket's attempts to connect: agreement with the other side, or not, and why."""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

_REASONS: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "the stream is encrypted on one side only, or something else listens there",
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not know this subscriber's key",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up, as one does whose stream is encrypted otherwise, or not at all",
}


@dataclass(frozen=True, slots=True)
class Connected:
    """The other side was reached and speaks the same language."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The other side was reached, and that was all. `final`: ZeroMQ will not try again by itself."""

    reason: str
    final: bool


def monitor_of(socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """A socket that tells how connecting goes, for `read_monitor`."""
    events = zmq.EVENT_HANDSHAKE_SUCCEEDED
    for event in _REASONS:
        events |= event
    return socket.get_monitor_socket(events)


def read_monitor(monitor: zmq.Socket[bytes]) -> Connected | Refused:
    """The next thing that happened; there must be one."""
    event = int(recv_monitor_message(monitor)["event"])
    reason = _REASONS.get(event)
    return Connected() if reason is None else Refused(reason, event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
