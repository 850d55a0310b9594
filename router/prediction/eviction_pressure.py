"""The price of evictions, from the share of evicted tokens that later requests need again.

    g = lost / evicted     both in tokens, averaged over `HORIZON` seconds, g at most 0.92
    μ(w) = g / (1 - g)     while w is full, else 0: the later cost of evicting for one token of prefill

`lost` counts the prefixes that were routed before and that no worker holds now. `evicted` is read from the event
streams. A worker without events counts as full, as a warm cache is.

Memory is bounded: one prefix in `STRIDE` chunks is remembered, and the least recently seen are forgotten.
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
# Fewer evicted tokens (50 blocks of 512) are too few to compute a share from.
LEAST_EVICTED = 25_600


class DecayingSum:
    """A sum whose parts decay: `horizon` seconds after it was added, a part counts 1/e."""

    def __init__(self, horizon: float) -> None:
        self._horizon = horizon
        self._sum = 0.0
        self._at = 0.0

    def add(self, amount: float, now: float) -> None:
        """Add an amount. `now`: in seconds of any clock."""
        self._sum = self.at(now) + amount
        self._at = now

    def at(self, now: float) -> float:
        """Return the sum at `now`."""
        return self._sum and self._sum * exp((self._at - now) / self._horizon)

    def __bool__(self) -> bool:
        """Return whether anything was ever added."""
        return self._sum > 0


class EvictionPressure:
    """The price of evictions μ, computed from every routed prompt and from what targets remove."""

    def __init__(
        self, chunk: int, stride: int = 16, remembered: int = 1 << 17, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the pressure of a router that has routed nothing.

        - `chunk`: the tokens of each hash of a prompt.
        - `stride`: one in this many hashes is remembered.
        - `remembered`: the most prefixes that are remembered.
        """
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
        """Record a routed prompt.

        - `hashes`: the hashes of its prefixes.
        - `held`: the most tokens of it that any worker holds.
        """
        if len(hashes) < self._stride:
            return
        known = self._routed.remember(array("Q", hashes[self._stride - 1 :: self._stride]), self._remembered)
        unit = self._chunk * self._stride
        if (lost := known - held // unit) > 0:
            self._lost.add(lost * unit, self._clock())

    def removed(self, tokens: Mapping[Target, int]) -> None:
        """Record the tokens that each target with an event stream has removed since it became known."""
        now = self._clock()
        for target, count in tokens.items():
            before = self._removed.get(target, count)
            if count > before:
                self._evicted.add(count - before, now)
                self._last_removal[target] = now
        unregistered = self._removed.keys() - tokens.keys()
        self._removed = dict(tokens)
        for target in unregistered:
            self._last_removal.pop(target, None)

    def price(self) -> float:
        """Return g / (1 - g) now; 0 while no stream reports evictions."""
        if not self._removed or not self._lost:
            return 0.0
        now = self._clock()
        lost_share = min(self._lost.at(now) / max(self._evicted.at(now), LEAST_EVICTED), MOST_LOST)
        return lost_share / (1 - lost_share)

    def evicting(self, target: Target) -> bool:
        """Return whether a target counts as full: it evicted within `HORIZON` seconds, or has no event stream."""
        if target not in self._removed:
            return True
        last = self._last_removal.get(target)
        return last is not None and self._clock() - last < HORIZON

    def __len__(self) -> int:
        """Return the number of remembered prefixes."""
        return self._routed.chunks
