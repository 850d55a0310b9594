"""Rooms of a rank: their states, their deadlines, and the reasons why recent ones ended."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from enum import IntEnum

MAX_ROOM = 2**63 - 1
MAX_TIMEOUT_S = 86400.0


class KVPoll(IntEnum):
    """The state of a room. Later states are larger, but Failed is the smallest (see `group_state`)."""

    Failed = 0
    Bootstrapping = 1
    WaitingForInput = 2
    Transferring = 3
    Success = 4


def group_state(states: Iterable[KVPoll]) -> KVPoll:
    """Return a TP group's state: failed, or that of its least advanced rank. Raises ValueError without states."""
    return min(states)


class KVTransferError(Exception):
    """A failed room and its reason."""

    def __init__(self, bootstrap_room: int, failure_reason: str) -> None:
        super().__init__(f"room {bootstrap_room}: {failure_reason}")
        self.bootstrap_room = bootstrap_room
        self.failure_reason = failure_reason


class Room:
    """The state machine of a room, for any thread. Success and Failed are final.

    - `generation`: distinguishes attempts with the same number.
    - `deadline`: an instant of `time.monotonic()`, at which the owner fails the room.
    """

    def __init__(self, number: int, generation: int, deadline: float) -> None:
        self.number = number
        self.generation = generation
        self.deadline = deadline
        self.reason = ""  # why it failed
        self._state = KVPoll.Bootstrapping
        self._quiet = False
        self._changed = threading.Condition()

    @property
    def state(self) -> KVPoll:
        return self._state

    @property
    def terminal(self) -> bool:
        return self._state in (KVPoll.Failed, KVPoll.Success)

    def advance(self, state: KVPoll) -> bool:
        """Move to a later state. Return False, without a change, for an earlier state or in a terminal one."""
        with self._changed:
            if self.terminal or state <= self._state:
                return False
            self._state = state
            self._changed.notify_all()
            return True

    def fail(self, reason: str) -> bool:
        """Fail the room. Return False in a terminal state, whose reason stays."""
        with self._changed:
            if self.terminal:
                return False
            self._state = KVPoll.Failed
            self.reason = reason
            self._changed.notify_all()
            return True

    @property
    def quiet(self) -> bool:
        """True if the pages may be reused: on decode no write can still land, on prefill none is read."""
        return self._quiet

    def set_quiet(self) -> None:
        with self._changed:
            self._quiet = True
            self._changed.notify_all()

    def wait(self, timeout: float) -> KVPoll:
        """Return the state once it is terminal, or after `timeout` seconds."""
        end = time.monotonic() + timeout
        with self._changed:
            while not self.terminal and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return self._state

    def wait_quiet(self, timeout: float) -> bool:
        """Return whether the room became quiet within `timeout` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._quiet, timeout)


def check_room(number: int) -> int:
    """Return a room number unchanged. Raises ValueError outside of [0, 2^63)."""
    if not 0 <= number <= MAX_ROOM:
        raise ValueError(f"bootstrap_room {number}: must be in [0, 2^63)")
    return number


def check_timeout(seconds: float, field: str) -> float:
    """Return a timeout unchanged. Raises ValueError, which names the field, unless it is positive and at most a day."""
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ValueError(f"{field} {seconds:g}: must be above 0 and at most {MAX_TIMEOUT_S:g} seconds")
    return seconds


MAX_REMEMBERED = 4096


class RecentRooms:
    """The last MAX_REMEMBERED rooms and the reasons of their end, each kept for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._rooms: OrderedDict[int, tuple[str, float]] = OrderedDict()

    def add(self, number: int, reason: str) -> None:
        self._rooms.pop(number, None)
        self._rooms[number] = reason, time.monotonic() + self._seconds
        if len(self._rooms) > MAX_REMEMBERED:
            self._rooms.popitem(last=False)

    def get(self, number: int) -> str | None:
        """Return why a room ended, or `None` if it is not remembered."""
        reason, until = self._rooms.get(number, (None, 0.0))
        return reason if time.monotonic() < until else None

    def forget(self, number: int) -> None:
        self._rooms.pop(number, None)
