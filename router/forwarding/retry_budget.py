"""The retry budget: retries are limited to a share of recent requests, so that they cannot overload the fleet."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW = 30  # seconds that count as recent


@dataclass(slots=True)
class _Second:
    """The counts of one second."""

    number: int
    requests: int = 0
    retries: int = 0


class RetryBudget:
    """A limit of `minimum` retries in the last `WINDOW` seconds, plus the share `share` of the requests in them."""

    def __init__(self, share: float, minimum: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._minimum = minimum
        self._clock = clock
        self._seconds: deque[_Second] = deque(maxlen=WINDOW)

    def request(self, now: float | None = None) -> None:
        """Count a request. `now` is the current time, if the caller just read the clock."""
        self._now(now).requests += 1

    @property
    def allows(self) -> bool:
        """True if a retry is left."""
        now = self._now()
        recent = [second for second in self._seconds if second.number > now.number - WINDOW]
        allowed = self._minimum + self._share * sum(second.requests for second in recent)
        return sum(second.retries for second in recent) + 1 <= allowed

    def take(self) -> bool:
        """Take a retry. Return false if none is left."""
        allowed = self.allows
        self._now().retries += allowed
        return allowed

    def _now(self, now: float | None = None) -> _Second:
        number = int(self._clock() if now is None else now)
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        return self._seconds[-1]
