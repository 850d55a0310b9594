"""The prefixes of the last prompts that each holder saw, in a tree that several holders share.

Every use of a prefix is a use of its shorter prefixes as well. So longer prefixes are forgotten before the shorter
ones that they extend. It is therefore enough to order the ends of prompts by their last use.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from itertools import islice

from router.cache_state.shared_prefixes import Edge, PrefixHolder, SharedPrefixes

# The most ends that are searched for a prefix, the latest first. Prefixes in use are among the latest.
_MOST_SEARCHED = 256


class Seen:
    """The last use of a prompt: its time by the caller's clock, and the new chunks that the holder had seen before."""

    __slots__ = ("added", "at")

    def __init__(self, at: float, added: int) -> None:
        self.at = at
        self.added = added


class RecentPrefixes(PrefixHolder):
    """The prefixes of one holder in a tree. `added`: the number of chunks that were new to it so far."""

    __slots__ = ("_ends", "_prefixes", "added")

    def __init__(self, prefixes: SharedPrefixes[RecentPrefixes]) -> None:
        super().__init__()
        self._prefixes = prefixes
        self.added = 0
        self._ends: OrderedDict[Edge[RecentPrefixes], Seen] = OrderedDict()  # the least recently seen first

    def remember(self, hashes: array[int], most: int, now: float = 0.0) -> int:
        """Remember a prompt with `most` chunks in all. Return the number of its chunks that were known before."""
        if not hashes:
            return 0
        before = self.chunks
        end = self._prefixes.hold(self, hashes)
        known = len(hashes) - (self.chunks - before)
        self.added += self.chunks - before
        if end in self._ends:
            self._prefixes.release(self, end)  # each end counts once
        self._ends[end] = Seen(now, self.added)
        self._ends.move_to_end(end)
        self._forget_ends_before(end)
        self.keep(most)
        return known

    def keep(self, most: int) -> None:
        """Forget all but `most` chunks."""
        while self.chunks > most:
            self._forget_some(self.chunks - most)

    def last_seen(self, hashes: array[int]) -> Seen | None:
        """Return the last use of a prompt's longest known prefix; None if it is unknown, or was long ago."""
        edge = self._prefixes.longest_of(self, hashes)
        if edge is None:
            return None
        for end in islice(reversed(self._ends), _MOST_SEARCHED):
            ancestor: Edge[RecentPrefixes] | None = end
            while ancestor is not None and ancestor is not edge:
                ancestor = ancestor.parent
            if ancestor is edge:
                return self._ends[end]
        return None

    def forget_before(self, at: float) -> None:
        """Forget the prompts whose last use was before `at`."""
        while self._ends and next(iter(self._ends.values())).at < at:
            end, _ = self._ends.popitem(last=False)
            self._prefixes.release(self, end)

    def forget(self) -> None:
        """Forget all prompts."""
        for end in self._ends:
            self._prefixes.release(self, end)
        self._ends.clear()

    def _forget_ends_before(self, end: Edge[RecentPrefixes]) -> None:
        """Forget the ends of shorter prompts that `end` extends, because `end` includes them."""
        edge = end.parent
        while edge is not None:
            before = edge.parent
            if edge in self._ends:
                del self._ends[edge]
                self._prefixes.release(self, edge)
            edge = before

    def _forget_some(self, chunks: int) -> None:
        """Forget at most `chunks` chunks at the end of the least recently used prompt."""
        end, seen = next(iter(self._ends.items()))
        before = self._prefixes.split(end, chunks) if chunks < len(end.hashes) else end.parent
        if before is not None and before.counts.get(self) == 1:  # no other prompt needs it: it is forgotten next
            self._prefixes.hold_edge(self, before)
            self._ends[before] = seen
            self._ends.move_to_end(before, last=False)
        del self._ends[end]
        self._prefixes.release(self, end)
