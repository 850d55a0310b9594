"""Rooms that ended lately, and why: so that the side that comes late hears of it at once."""

from __future__ import annotations

import time
from collections import OrderedDict

MAX_REMEMBERED = 4096


class RecentRooms:
    """The last MAX_REMEMBERED rooms, each for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._rooms: OrderedDict[int, tuple[str, float]] = OrderedDict()

    def add(self, number: int, reason: str) -> None:
        self._rooms.pop(number, None)
        self._rooms[number] = reason, time.monotonic() + self._seconds
        if len(self._rooms) > MAX_REMEMBERED:
            self._rooms.popitem(last=False)

    def get(self, number: int) -> str | None:
        """Why it ended, if it is remembered."""
        reason, until = self._rooms.get(number, (None, 0.0))
        return reason if time.monotonic() < until else None

    def forget(self, number: int) -> None:
        self._rooms.pop(number, None)
