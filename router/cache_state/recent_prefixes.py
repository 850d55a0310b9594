"""The prefixes of the last prompts that each holder saw.

Whatever touches a prefix touches its shorter ones after it: so extensions are forgotten before what they extend. It is
therefore enough to know in what order the ends of prompts were seen.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from itertools import islice

from router.cache_state.shared_prefixes import Edge, PrefixHolder, SharedPrefixes

# Looked at, from the last prompt on, to find when a prefix was seen. Those in use are among the last ones.
_MOST_LOOKED_AT = 256


class Seen:
    """When a prompt was seen, in seconds, and how many chunks had been new until then."""

    __slots__ = ("added", "at")

    def __init__(self, at: float, added: int) -> None:
        self.at = at
        self.added = added


class RecentPrefixes(PrefixHolder):
    """What one holder in a tree has seen and not forgotten. `added`: how many chunks were new to it so far."""

    __slots__ = ("_ends", "_prefixes", "added")

    def __init__(self, prefixes: SharedPrefixes[RecentPrefixes]) -> None:
        super().__init__()
        self._prefixes = prefixes
        self.added = 0
        self._ends: OrderedDict[Edge[RecentPrefixes], Seen] = OrderedDict()  # the least recently seen first

    def remember(self, hashes: array[int], most: int, now: float = 0.0) -> int:
        """See a prompt. Of all prefixes `most` are kept. Returns how many of this prompt's were known."""
        if not hashes:
            return 0
        before = self.chunks
        end = self._prefixes.hold(self, hashes)
        known = len(hashes) - (self.chunks - before)
        self.added += self.chunks - before
        if end in self._ends:
            self._prefixes.let_go(self, end)  # it counts once
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
        """When the longest known prefix of a prompt was seen last. None when there is none, or that was long ago."""
        edge = self._prefixes.longest_of(self, hashes)
        if edge is None:
            return None
        for end in islice(reversed(self._ends), _MOST_LOOKED_AT):
            on_the_way: Edge[RecentPrefixes] | None = end
            while on_the_way is not None and on_the_way is not edge:
                on_the_way = on_the_way.parent
            if on_the_way is edge:
                return self._ends[end]
        return None

    def forget_before(self, at: float) -> None:
        """Forget what was seen before then."""
        while self._ends and next(iter(self._ends.values())).at < at:
            end, _ = self._ends.popitem(last=False)
            self._prefixes.let_go(self, end)

    def forget(self) -> None:
        """Nothing is known any more."""
        for end in self._ends:
            self._prefixes.let_go(self, end)
        self._ends.clear()

    def _forget_ends_before(self, end: Edge[RecentPrefixes]) -> None:
        """What ended on the way to an end that was just seen is seen with it."""
        edge = end.parent
        while edge is not None:
            before = edge.parent
            if edge in self._ends:
                del self._ends[edge]
                self._prefixes.let_go(self, edge)
            edge = before

    def _forget_some(self, chunks: int) -> None:
        """Forget `chunks` at most, of the end that was not seen the longest."""
        end, seen = next(iter(self._ends.items()))
        before = self._prefixes.split(end, chunks) if chunks < len(end.hashes) else end.parent
        if before is not None and before.counts.get(self) == 1:  # nothing else needs it: it is the next to go
            self._prefixes.hold_edge(self, before)
            self._ends[before] = seen
            self._ends.move_to_end(before, last=False)
        del self._ends[end]
        self._prefixes.let_go(self, end)
