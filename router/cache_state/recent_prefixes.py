"""The prefixes that one holder in a tree has used recently, and the learned bounds on what it keeps.

`RecentPrefixes` is a tree that several holders share. Every use of a prefix is a use of its shorter prefixes as well.
So longer prefixes are forgotten before the shorter ones that they extend. It is therefore enough to order the ends of
prompts by their last use.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice

from indexer.shared_prefixes import SharedPrefixes
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS

# The most ends that are searched for a prefix, the latest first. Prefixes in use are among the latest.
_MOST_SEARCHED = 256
# The capacity of targets that do not report it: that of an 8-billion-parameter model on a GPU of 80 GB.
DEFAULT_CAPACITY = 2**19
# A bound that proved too low grows to at least these. From the longest, or the default capacity on, it is dropped.
_LEAST_CHUNKS = 64
_LEAST_SECONDS = 30.0
_LONGEST_SECONDS = 86_400.0


class Seen:
    """The last use of a prompt: its time by the caller's clock, and the new chunks that the holder had seen before."""

    __slots__ = ("added", "at")

    def __init__(self, at: float, added: int) -> None:
        self.at = at
        self.added = added


class RecentPrefixes:
    """The prefixes of one holder in a tree.

    - `number`: the holder's number in the tree.
    - `added`: the number of chunks that were new to it so far.
    """

    __slots__ = ("_ends", "_prefixes", "added", "number")

    def __init__(self, prefixes: SharedPrefixes) -> None:
        self._prefixes = prefixes
        self.number = prefixes.add()
        self.added = 0
        self._ends: OrderedDict[int, Seen] = OrderedDict()  # by edge, the least recently seen first

    @property
    def chunks(self) -> int:
        """The number of chunks that it holds."""
        return self._prefixes.chunks(self.number)

    def remember(self, hashes: array[int], most: int, now: float = 0.0) -> int:
        """Remember a prompt with `most` chunks in all. Return the number of its chunks that were known before."""
        if not hashes:
            return 0
        prefixes, number = self._prefixes, self.number
        before = prefixes.chunks(number)
        end = prefixes.hold(number, hashes)
        held = prefixes.chunks(number)
        self.added += held - before
        if end in self._ends:
            prefixes.release(number, end)  # each end counts once
        self._ends[end] = Seen(now, self.added)
        self._ends.move_to_end(end)
        if len(self._ends) > 1:
            self._forget_ends_before(end)
        if held > most:
            self.keep(most)
        return len(hashes) - (held - before)

    def keep(self, most: int) -> None:
        """Forget all but `most` chunks."""
        while (chunks := self.chunks) > most:
            self._forget_some(chunks - most)

    def last_seen(self, hashes: array[int]) -> Seen | None:
        """Return the last use of a prompt's longest known prefix; None if it is unknown, or was long ago."""
        edge = self._prefixes.longest_of(self.number, hashes)
        if not edge:
            return None
        for end in islice(reversed(self._ends), _MOST_SEARCHED):
            ancestor = end
            while ancestor not in (0, edge):
                ancestor = self._prefixes.parent(ancestor)
            if ancestor == edge:
                return self._ends[end]
        return None

    def forget_before(self, at: float) -> None:
        """Forget the prompts whose last use was before `at`."""
        while self._ends and next(iter(self._ends.values())).at < at:
            end, _ = self._ends.popitem(last=False)
            self._prefixes.release(self.number, end)

    def forget(self) -> None:
        """Forget all prompts."""
        for end in self._ends:
            self._prefixes.release(self.number, end)
        self._ends.clear()

    def _forget_ends_before(self, end: int) -> None:
        """Forget the ends of shorter prompts that `end` extends, because `end` includes them."""
        edge = self._prefixes.parent(end)
        while edge:
            before = self._prefixes.parent(edge)
            if edge in self._ends:
                del self._ends[edge]
                self._prefixes.release(self.number, edge)
            edge = before

    def _forget_some(self, chunks: int) -> None:
        """Forget at most `chunks` chunks at the end of the least recently used prompt."""
        end, seen = next(iter(self._ends.items()))
        prefixes, number = self._prefixes, self.number
        before = prefixes.split(end, chunks) if chunks < prefixes.length(end) else prefixes.parent(end)
        if before and prefixes.count(before, number) == 1:  # no other prompt needs it: it is forgotten next
            prefixes.hold_edge(number, before)
            self._ends[before] = seen
            self._ends.move_to_end(before, last=False)
        del self._ends[end]
        self._prefixes.release(self.number, end)


@dataclass(slots=True)
class Retention:
    """The learned bounds on what a target keeps.

    - `chunks`: the chunks that it keeps; None while no prefix was missing because of too many chunks.
    - `seconds`: the seconds that it keeps a prefix; None while no prefix was missing because of its age.
    """

    chunks: int | None = None
    seconds: float | None = None
    proven_chunks: int = 0
    proven_seconds: float = 0.0

    @property
    def tokens(self) -> int | None:
        """The tokens that the target keeps; None while the bound is not known."""
        return None if self.chunks is None else self.chunks * CHUNK_TOKENS

    def hit(self, chunks: int, seconds: float) -> None:
        """Record that a prefix was still cached, `chunks` new chunks and `seconds` after it was last sent."""
        self.proven_chunks = max(self.proven_chunks, chunks)
        self.proven_seconds = max(self.proven_seconds, seconds)

    def missed(self, chunks: int, seconds: float) -> bool:
        """Lower a bound after a miss. Return False if no bound explains it, so that the cache must have been reset."""
        if chunks > self.proven_chunks:
            self.chunks = (self.proven_chunks + chunks) // 2
        elif seconds > self.proven_seconds:
            self.seconds = (self.proven_seconds + seconds) / 2
        else:
            self.proven_chunks, self.proven_seconds = 0, 0.0
            return False
        return True

    def keeps_more(self) -> None:
        """Raise the bounds, because more was cached than they allow."""
        if self.chunks is not None:
            more = max(2 * self.chunks, _LEAST_CHUNKS)
            self.chunks = more if more < DEFAULT_CAPACITY // CHUNK_TOKENS else None
        if self.seconds is not None:
            longer = max(2 * self.seconds, _LEAST_SECONDS)
            self.seconds = longer if longer < _LONGEST_SECONDS else None
