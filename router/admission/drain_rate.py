"""How fast places come free, and so how long who finds none had better wait."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

_RATE_SECONDS = 30.0
LONGEST_RETRY = 60


class DrainRate:
    """How fast places come free: over the last `_RATE_SECONDS`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._before: deque[tuple[int, int]] = deque(maxlen=int(_RATE_SECONDS))  # seconds, and how many came free
        self._second = self._freed = 0  # of the last one

    def count(self) -> None:
        """One came free."""
        now = int(self._clock())
        if now != self._second:
            if self._freed:
                self._before.append((self._second, self._freed))
            self._second, self._freed = now, 0
        self._freed += 1

    def seconds_for(self, places: int, otherwise: float) -> int:
        """Whole seconds until `places` come free at this rate, at least 1; `otherwise` where none ever did."""
        now = self._clock()
        known = [*self._before, (self._second, self._freed)]
        recent = [(second, freed) for second, freed in known if second > now - _RATE_SECONDS and freed]
        freed = sum(freed for _, freed in recent)
        seconds = places * max(now - recent[0][0], 1.0) / freed if freed else otherwise
        return min(max(math.ceil(seconds), 1), LONGEST_RETRY)
