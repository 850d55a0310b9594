"""The prefixes of the last prompts that each holder saw.

Whatever touches a prefix touches its shorter ones after it: so extensions are forgotten before what they extend. It is
therefore enough to know in what order the ends of prompts were seen.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from router.holdings.shared_prefixes import Edge, PrefixHolder, SharedPrefixes


class RecentPrefixes(PrefixHolder):
    """What one holder in a tree has seen and not forgotten."""

    __slots__ = ("_ends", "_prefixes")

    def __init__(self, prefixes: SharedPrefixes[RecentPrefixes]) -> None:
        super().__init__()
        self._prefixes = prefixes
        self._ends: OrderedDict[Edge[RecentPrefixes], None] = OrderedDict()  # the least recently seen first

    def remember(self, hashes: array[int], most: int) -> int:
        """See a prompt. Of all prefixes `most` are kept. Returns how many of this prompt's were known."""
        if not hashes:
            return 0
        before = self.chunks
        end = self._prefixes.hold(self, hashes)
        known = len(hashes) - (self.chunks - before)
        if end in self._ends:
            self._prefixes.let_go(self, end)  # it counts once
        self._ends[end] = None
        self._ends.move_to_end(end)
        self._forget_ends_before(end)
        while self.chunks > most:
            self._forget_some(self.chunks - most)
        return known

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
        end = next(iter(self._ends))
        before = self._prefixes.split(end, chunks) if chunks < len(end.hashes) else end.parent
        if before is not None and before.counts.get(self) == 1:  # nothing else needs it: it is the next to go
            self._prefixes.hold_edge(self, before)
            self._ends[before] = None
            self._ends.move_to_end(before, last=False)
        del self._ends[end]
        self._prefixes.let_go(self, end)
