"""How much a peer may ask for without getting on with anything."""

from __future__ import annotations

import time
from collections.abc import Callable


class Allowance:
    """Refills by `rate` a second up to `most`. What gets on earns more, up to `most` as well."""

    __slots__ = ("_at", "_clock", "_left", "_most", "_rate")

    def __init__(self, most: float, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._rate = rate
        self._clock = clock
        self._left = most
        self._at = clock()

    def earn(self, amount: float) -> None:
        """Something got on."""
        self._left = min(self._most, self._left + amount)

    def take(self, amount: float = 1.0) -> bool:
        """Whether so much is left; it is taken."""
        self._left -= amount
        if self._left >= 0:
            return True
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left >= 0
