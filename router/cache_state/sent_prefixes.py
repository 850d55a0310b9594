"""The prefixes that were sent to targets, to predict the cached tokens of targets whose events are missing or wrong.

The prompts of a target are remembered as hashes of their prefixes, up to the size of its memory. The least recently
sent are forgotten first. The size of its memory, and how long it keeps unused prefixes, are learned from the cached
tokens that its answers report.

`RecentPrefixes` is a tree that several holders share. Every use of a prefix is a use of its shorter prefixes as well.
So longer prefixes are forgotten before the shorter ones that they extend. It is therefore enough to order the ends of
prompts by their last use.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

from indexer import Target
from indexer.index import TreeRows
from indexer.shared_prefixes import SharedPrefixes, make_shared_prefixes
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS, HolderRows

# The most ends that are searched for a prefix, the latest first. Prefixes in use are among the latest.
_MOST_SEARCHED = 256
# The capacity of targets that do not report it: that of an 8-billion-parameter model on a GPU of 80 GB.
DEFAULT_CAPACITY = 2**19
# Predicted and reported tokens that differ by less count as equal: blocks differ from chunks, and text from tokens.
_TOLERANCE_TOKENS = 128
_TOLERANCE_SHARE = 0.1
# Shorter prefixes teach nothing.
_LEAST_TOKENS = 64
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


class SentPrefixes:
    """The prefixes of the prompts that each target answered. `sent`: those of each target that has any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefixes = make_shared_prefixes()
        self.sent: dict[Target, RecentPrefixes] = {}
        self._targets: dict[int, Target] = {}  # by holder
        self._removals = 0  # counts the holders that were removed
        self._retention: dict[Target, Retention] = {}
        self._expiring: set[Target] = set()  # targets with a learned bound in seconds

    def remember(self, target: Target, hashes: array[int], capacity: int | None) -> None:
        """Remember a prompt that a target has answered. `capacity`: the tokens that it can hold, if known."""
        sent = self.sent.get(target)
        if sent is None:
            sent = self.sent[target] = RecentPrefixes(self._prefixes)
            self._targets[sent.number] = target
        chunks = (capacity or DEFAULT_CAPACITY) // CHUNK_TOKENS
        learned = self._retention.get(target)
        if learned is not None and learned.chunks is not None:
            chunks = min(
                chunks, max(learned.chunks, len(hashes))
            )  # a prompt that was just computed is cached as a whole
        sent.remember(hashes, chunks, self._clock())

    def overlaps(self, hashes: array[int]) -> dict[Target, int]:
        """Return the tokens of a prompt's longest remembered prefix by target. Targets without any are left out."""
        if not self.sent:
            return {}
        self._expire_all()
        found = self._prefixes.longest(hashes)
        return {self._targets[holder]: CHUNK_TOKENS * chunks for holder, chunks in found.items()}

    def tree(self, rows: HolderRows) -> TreeRows:
        """Return the tree of the remembered prompts, with a caller's row of each holder."""
        self._expire_all()
        return self._prefixes, rows.follow(self._removals), 1

    def target_of(self, holder: int) -> Target:
        """Return the target of a holder in the tree."""
        return self._targets[holder]

    def resumable(self, target: Target, hashes: array[int], window: int) -> int:
        """Return the tokens of a prompt that a target can reuse, if its groups keep only the last `window` tokens."""
        sent = self.sent.get(target)
        if sent is None:
            return 0
        return CHUNK_TOKENS * self._prefixes.resumable(sent.number, hashes, window // CHUNK_TOKENS)

    def compare(self, target: Target, hashes: array[int], cached: int, sent_at: float) -> None:
        """Learn a target's bounds from an answer. To be called before the prompt is remembered.

        A prefix that was sent again after `sent_at` teaches nothing.

        - `sent_at`: when the prompt was sent, by the clock.
        """
        sent = self.sent.get(target)
        held = CHUNK_TOKENS * self._prefixes.longest(hashes).get(sent.number, 0) if sent is not None else 0
        tolerance = max(_TOLERANCE_TOKENS, int(held * _TOLERANCE_SHARE))
        learned = self._retention.get(target)
        if cached > held + tolerance:
            if learned is not None:
                learned.keeps_more()
                self._apply_seconds(target, learned)
            return
        seen = sent.last_seen(hashes) if sent is not None and held >= _LEAST_TOKENS else None
        if sent is None or seen is None or seen.at >= sent_at:
            return
        if learned is None:
            learned = self._retention[target] = Retention()
        since, age = sent.added - seen.added, sent_at - seen.at
        if cached >= max(held - tolerance, held / 2):
            learned.hit(since, age)
        elif not learned.missed(since, age):
            sent.forget_before(sent_at)
        elif learned.chunks is not None:
            sent.keep(learned.chunks)
        self._apply_seconds(target, learned)

    def learned(self, target: Target) -> Retention | None:
        """Return the learned bounds of a target; None if nothing was learned."""
        return self._retention.get(target)

    def forget(self, target: Target) -> None:
        """Forget the prefixes of a target, because its cache was cleared or they are not needed."""
        sent = self.sent.pop(target, None)
        if sent is not None:
            sent.forget()
            del self._targets[sent.number]
            self._prefixes.remove(sent.number)
            self._removals += 1

    def removed(self, target: Target) -> None:
        """Forget a target that was removed, and its learned bounds."""
        self.forget(target)
        self._retention.pop(target, None)
        self._expiring.discard(target)

    def targets(self) -> list[Target]:
        """Return the targets with remembered prefixes."""
        return list(self.sent)

    def __len__(self) -> int:
        return sum(sent.chunks for sent in self.sent.values())

    def _apply_seconds(self, target: Target, learned: Retention) -> None:
        (self._expiring.discard if learned.seconds is None else self._expiring.add)(target)
        self._expire(target)

    def _expire_all(self) -> None:
        for target in self._expiring:
            self._expire(target)

    def _expire(self, target: Target) -> None:
        learned, sent = self._retention.get(target), self.sent.get(target)
        if learned is not None and learned.seconds is not None and sent is not None:
            sent.forget_before(self._clock() - learned.seconds)
