"""The prefixes that were sent to targets, to predict the cached tokens of targets whose events are missing or wrong.

The prompts of a target are remembered as hashes of their prefixes, up to the size of its memory. The least recently
sent are forgotten first. The size of its memory, and how long it keeps unused prefixes, are learned from the cached
tokens that its answers report.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from indexer import Target
from indexer.index import TreeRows
from indexer.shared_prefixes import make_shared_prefixes
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS, HolderRows
from router.cache_state.recent_prefixes import DEFAULT_CAPACITY, RecentPrefixes, Retention
from router.cache_state.target_cache import TargetCache

# Predicted and reported tokens that differ by less count as equal: blocks differ from chunks, and text from tokens.
_TOLERANCE_TOKENS = 128
_TOLERANCE_SHARE = 0.1
# Shorter prefixes teach nothing.
_LEAST_TOKENS = 64


class SentPrefixes:
    """The prefixes of the prompts that each target answered. `holders`: the targets that have any, by their number."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefixes = make_shared_prefixes()
        self.holders: dict[int, TargetCache] = {}
        self._removals = 0  # counts the holders that were removed
        self._expiring: set[TargetCache] = set()  # targets with a learned bound in seconds

    def remember(self, cache: TargetCache, hashes: array[int], capacity: int | None) -> None:
        """Remember a prompt that a target has answered. `capacity`: the tokens that it can hold, if known."""
        if cache.sent is None:
            cache.sent = RecentPrefixes(self._prefixes)
            self.holders[cache.sent.number] = cache
        chunks, learned = (capacity or DEFAULT_CAPACITY) // CHUNK_TOKENS, cache.retention
        if learned is not None and learned.chunks is not None:
            chunks = min(
                chunks, max(learned.chunks, len(hashes))
            )  # a prompt that was just computed is cached as a whole
        cache.sent.remember(hashes, chunks, self._clock())

    def overlaps(self, hashes: array[int]) -> dict[Target, int]:
        """Return the tokens of a prompt's longest remembered prefix by target. Targets without any are left out."""
        if not self.holders:
            return {}
        self._expire_all()
        found = self._prefixes.longest(hashes)
        return {self.holders[holder].target: CHUNK_TOKENS * chunks for holder, chunks in found.items()}

    def tree(self, rows: HolderRows) -> TreeRows:
        """Return the tree of the remembered prompts, with a caller's row of each holder."""
        self._expire_all()
        return self._prefixes, rows.follow(self._removals), 1

    def target_of(self, holder: int) -> Target:
        """Return the target of a holder in the tree."""
        return self.holders[holder].target

    def resumable(self, cache: TargetCache, hashes: array[int], window: int) -> int:
        """Return the tokens of a prompt that a target can reuse, if its groups keep only the last `window` tokens."""
        if cache.sent is None:
            return 0
        return CHUNK_TOKENS * self._prefixes.resumable(cache.sent.number, hashes, window // CHUNK_TOKENS)

    def compare(self, cache: TargetCache, hashes: array[int], cached: int, sent_at: float) -> None:
        """Learn a target's bounds from an answer. To be called before the prompt is remembered.

        A prefix that was sent again after `sent_at` teaches nothing.

        - `sent_at`: when the prompt was sent, by the clock.
        """
        sent, learned = cache.sent, cache.retention
        held = CHUNK_TOKENS * self._prefixes.longest(hashes).get(sent.number, 0) if sent is not None else 0
        tolerance = max(_TOLERANCE_TOKENS, int(held * _TOLERANCE_SHARE))
        if cached > held + tolerance:
            if learned is not None:
                learned.keeps_more()
                self._apply_seconds(cache, learned)
            return
        seen = sent.last_seen(hashes) if sent is not None and held >= _LEAST_TOKENS else None
        if sent is None or seen is None or seen.at >= sent_at:
            return
        if learned is None:
            learned = cache.retention = Retention()
        since, age = sent.added - seen.added, sent_at - seen.at
        if cached >= max(held - tolerance, held / 2):
            learned.hit(since, age)
        elif not learned.missed(since, age):
            sent.forget_before(sent_at)
        elif learned.chunks is not None:
            sent.keep(learned.chunks)
        self._apply_seconds(cache, learned)

    def forget(self, cache: TargetCache) -> None:
        """Forget the prefixes of a target, because its cache was cleared, it was removed, or they are not needed."""
        sent, cache.sent = cache.sent, None
        if sent is not None:
            sent.forget()
            del self.holders[sent.number]
            self._prefixes.remove(sent.number)
            self._removals += 1
        if cache.removed:
            self._expiring.discard(cache)

    def __len__(self) -> int:
        return sum(cache.sent.chunks for cache in self.holders.values() if cache.sent is not None)

    def _apply_seconds(self, cache: TargetCache, learned: Retention) -> None:
        (self._expiring.discard if learned.seconds is None else self._expiring.add)(cache)
        self._expire(cache)

    def _expire_all(self) -> None:
        for cache in self._expiring:
            self._expire(cache)

    def _expire(self, cache: TargetCache) -> None:
        learned, sent = cache.retention, cache.sent
        if learned is not None and learned.seconds is not None and sent is not None:
            sent.forget_before(self._clock() - learned.seconds)
