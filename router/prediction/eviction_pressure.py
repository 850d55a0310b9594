"""What evictions cost: how much of what workers evict is asked for again while no worker holds it.

    g = lost / evicted     both in tokens, averaged over `HORIZON` seconds, g at most 0.92
    μ(w) = g / (1 - g)     while w is full, else 0: what evicting for one token of prefill costs later

`lost` comes from the router's own history: prefixes that were routed before and that no worker holds now. `evicted`
comes from the event streams. A worker without events is taken to evict, as a warm cache does.

Memory is bounded: one prefix in `STRIDE` chunks is remembered, and the longest unseen are forgotten.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from math import exp

from indexer import Target
from router.cache_state.recent_prefixes import RecentPrefixes
from router.cache_state.shared_prefixes import SharedPrefixes

HORIZON = 120.0
MOST_LOST = 0.92
# Fewer evicted tokens (50 blocks of 512) say nothing.
LEAST_EVICTED = 25_600


class DecayingSum:
    """A sum whose parts fade with time: after `horizon` seconds a part counts 1/e."""

    def __init__(self, horizon: float) -> None:
        self._horizon = horizon
        self._sum = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        self._sum = self.at(now) + amount
        self._at = now

    def at(self, now: float) -> float:
        return self._sum and self._sum * exp((self._at - now) / self._horizon)

    def __bool__(self) -> bool:
        """Whether anything was ever added."""
        return self._sum > 0


class EvictionPressure:
    """Told of every routed prompt and of what targets removed; knows μ.

    `chunk`: tokens that each of a prompt's prefix hashes stands for. `stride`: one of this many is remembered.
    `remembered`: how many prefixes, at most.
    """

    def __init__(
        self, chunk: int, stride: int = 16, remembered: int = 1 << 17, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._chunk = chunk
        self._stride = stride
        self._remembered = remembered
        self._clock = clock
        self._routed = RecentPrefixes(SharedPrefixes())
        self._lost = DecayingSum(HORIZON)
        self._evicted = DecayingSum(HORIZON)
        self._removed: dict[Target, int] = {}
        self._last_removal: dict[Target, float] = {}

    def routed(self, hashes: Sequence[int], held: int) -> None:
        """A prompt was routed: the hashes of its prefixes, and the most tokens of it that any worker held."""
        if len(hashes) < self._stride:
            return
        known = self._routed.remember(array("Q", hashes[self._stride - 1 :: self._stride]), self._remembered)
        unit = self._chunk * self._stride
        if (lost := known - held // unit) > 0:
            self._lost.add(lost * unit, self._clock())

    def removed(self, tokens: Mapping[Target, int]) -> None:
        """How many tokens each target with an event stream has removed since it became known."""
        now = self._clock()
        for target, count in tokens.items():
            before = self._removed.get(target, count)
            if count > before:
                self._evicted.add(count - before, now)
                self._last_removal[target] = now
        gone = self._removed.keys() - tokens.keys()
        self._removed = dict(tokens)
        for target in gone:
            self._last_removal.pop(target, None)

    def price(self) -> float:
        """g / (1 - g) now; 0 while no stream reports evictions."""
        if not self._removed or not self._lost:
            return 0.0
        now = self._clock()
        lost_share = min(self._lost.at(now) / max(self._evicted.at(now), LEAST_EVICTED), MOST_LOST)
        return lost_share / (1 - lost_share)

    def evicting(self, target: Target) -> bool:
        """Whether a target is full, as it evicted within `HORIZON`, or has no stream to say so."""
        if target not in self._removed:
            return True
        last = self._last_removal.get(target)
        return last is not None and self._clock() - last < HORIZON

    def __len__(self) -> int:
        """The number of remembered prefixes."""
        return self._routed.chunks
