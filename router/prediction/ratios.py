"""The last ratios of what came to what was predicted: how far off predictions are."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import deque
from typing import Final

KEPT: Final = 128


class Ratios:
    """The last `KEPT` of them, in order as well."""

    __slots__ = ("_latest", "_ordered")

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, ratio: float) -> None:
        """One more; the oldest is forgotten."""
        if len(self._latest) >= KEPT:
            oldest = self._latest.popleft()
            del self._ordered[bisect_right(self._ordered, oldest) - 1]
        self._latest.append(ratio)
        insort(self._ordered, ratio)

    def at(self, share: float) -> float:
        """The ratio below which this share of them lies. There is one, at least."""
        return self._ordered[int(share * (len(self._ordered) - 1) + 0.5)]

    def at_most(self, ratio: float) -> float:
        """The share of them that are so large at most. There is one, at least."""
        return bisect_right(self._ordered, ratio) / len(self._ordered)
