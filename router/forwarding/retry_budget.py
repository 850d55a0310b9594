"""How many requests may be sent a second time: a share of the recent ones, so that retries never become a storm."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW = 30  # seconds that count as recent


@dataclass(slots=True)
class _Second:
    """What was counted in one second."""

    number: int
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """Allows `minimum` retries in the last `WINDOW` seconds, and `share` of the requests in them beyond."""

    def __init__(self, share: float, minimum: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._minimum = minimum
        self._clock = clock
        self._seconds: deque[_Second] = deque(maxlen=WINDOW)

    def request(self, now: float | None = None) -> None:
        """A request came. `now`: the time by the clock, where it was just read."""
        self._now(now).requests += 1

    @property
    def allows(self) -> bool:
        """Whether there is a retry left."""
        now = self._now()
        recent = [second for second in self._seconds if second.number > now.number - WINDOW]
        allowed = self._minimum + self._share * sum(second.requests for second in recent)
        return sum(second.retries for second in recent) + 1 <= allowed

    def take(self) -> bool:
        """Take a retry, if there is one left."""
        allowed = self.allows
        self._now().retries += allowed
        return allowed

    def _now(self, now: float | None = None) -> _Second:
        number = int(self._clock() if now is None else now)
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]
