"""How much of its time a fleet spends on prefills."""

from __future__ import annotations

from math import exp
from typing import Final

HORIZON: Final = 60.0


class PrefillShare:
    """The share of targets that compute prompts, as it was seen over the last `HORIZON` seconds or so: what was seen
    then counts 1/e. Until enough was seen: all of them, for nothing is known."""

    def __init__(self) -> None:
        self.average = 1.0
        self._at: float | None = None

    def see(self, share: float, now: float) -> None:
        """What it is now, `now` in seconds of any clock."""
        if self._at is None:
            self._at = now
        elif now > self._at:
            self.average = share + (self.average - share) * exp((self._at - now) / HORIZON)
            self._at = now
