"""What a rank is likely to hold by what was sent to it, for ranks whose events are missing or wrong.

A rank's prompts are remembered as hashes of their prefixes, the least recently sent forgotten first, up to what its
memory holds. How much that is, and how long it keeps what nobody asks for, is learned from the cached tokens that its
answers tell.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from indexer import Target
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.cache_state.recent_prefixes import RecentPrefixes
from router.cache_state.shared_prefixes import SharedPrefixes

# For ranks that do not say how much they hold: an 8-billion-parameter model on a GPU of 80 GB.
DEFAULT_CAPACITY = 2**19
# Predicted and told tokens that differ by less are equal: blocks are not chunks, and text is no tokens.
_TOLERANCE_TOKENS = 128
_TOLERANCE_SHARE = 0.1
_LEAST_TOKENS = 64  # of a prefix from which anything is learned
# What a bound grows to at least when more was found, and where it is none any more.
_LEAST_CHUNKS = 64
_LEAST_SECONDS = 30.0
_LONGEST_SECONDS = 86_400.0


@dataclass(slots=True)
class Retention:
    """How much a rank keeps, and how long, as its answers showed; None where nothing was missed yet.

    `proven_chunks`, `proven_seconds`: the most that had come since a prefix was sent the last time, and the longest
    time since then, after which it was still there.
    """

    chunks: int | None = None
    seconds: float | None = None
    proven_chunks: int = 0
    proven_seconds: float = 0.0

    @property
    def tokens(self) -> int | None:
        """The same amount in tokens."""
        return None if self.chunks is None else self.chunks * CHUNK_TOKENS

    def hit(self, chunks: int, seconds: float) -> None:
        """A prefix was still there, this much and this long after it was sent the last time."""
        self.proven_chunks = max(self.proven_chunks, chunks)
        self.proven_seconds = max(self.proven_seconds, seconds)

    def missed(self, chunks: int, seconds: float) -> bool:
        """It was not: the bound is somewhere between this and what was proven.

        False when neither amount nor time explains that: the cache was reset.
        """
        if chunks > self.proven_chunks:
            self.chunks = (self.proven_chunks + chunks) // 2
        elif seconds > self.proven_seconds:
            self.seconds = (self.proven_seconds + seconds) / 2
        else:
            self.proven_chunks, self.proven_seconds = 0, 0.0
            return False
        return True

    def keeps_more(self) -> None:
        """More was there than was remembered."""
        if self.chunks is not None:
            more = max(2 * self.chunks, _LEAST_CHUNKS)
            self.chunks = more if more < DEFAULT_CAPACITY // CHUNK_TOKENS else None
        if self.seconds is not None:
            longer = max(2 * self.seconds, _LEAST_SECONDS)
            self.seconds = longer if longer < _LONGEST_SECONDS else None


class SentPrefixes:
    """The prompts that were answered, by target."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._prefixes: SharedPrefixes[RecentPrefixes] = SharedPrefixes()
        self._sent: dict[Target, RecentPrefixes] = {}
        self._targets: dict[RecentPrefixes, Target] = {}
        self._retention: dict[Target, Retention] = {}
        self._expiring: set[Target] = set()  # those that keep what they hold for a time that was learned

    def remember(self, target: Target, hashes: array[int], capacity: int | None) -> None:
        """A target has seen a prompt. `capacity`: the tokens it can hold."""
        sent = self._sent.get(target)
        if sent is None:
            sent = self._sent[target] = RecentPrefixes(self._prefixes)
            self._targets[sent] = target
        chunks = (capacity or DEFAULT_CAPACITY) // CHUNK_TOKENS
        learned = self._retention.get(target)
        if learned is not None and learned.chunks is not None:
            chunks = min(chunks, max(learned.chunks, len(hashes)))  # what it has just computed it holds
        sent.remember(hashes, chunks, self._clock())

    def overlaps(self, hashes: array[int]) -> dict[Target, int]:
        """How many tokens of a prompt, from its start on, each target has seen and not forgotten, if any."""
        if not self._sent:
            return {}
        for target in self._expiring:
            self._expire(target)
        return {self._targets[sent]: CHUNK_TOKENS * chunks for sent, chunks in self._prefixes.longest(hashes).items()}

    def resumable(self, target: Target, hashes: array[int], window: int) -> int:
        """The same of one target, whose groups keep but a `window` of each prompt."""
        sent = self._sent.get(target)
        return CHUNK_TOKENS * self._prefixes.resumable(sent, hashes, window // CHUNK_TOKENS) if sent is not None else 0

    def compare(self, target: Target, hashes: array[int], cached: int, sent_at: float) -> None:
        """A target told how many tokens of a prompt it found. To be called before it is remembered.

        `sent_at`: when the prompt was sent, by the clock. A prefix that was seen again since then teaches nothing.
        """
        sent = self._sent.get(target)
        held = CHUNK_TOKENS * self._prefixes.longest(hashes).get(sent, 0) if sent is not None else 0
        tolerance = max(_TOLERANCE_TOKENS, int(held * _TOLERANCE_SHARE))
        learned = self._retention.get(target)
        if cached > held + tolerance:
            if learned is not None:
                learned.keeps_more()
                self._look_at_time(target, learned)
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
        self._look_at_time(target, learned)

    def learned(self, target: Target) -> Retention | None:
        """How much and how long a target was seen to keep."""
        return self._retention.get(target)

    def forget(self, target: Target) -> None:
        """A target holds nothing any more, or its history is not needed."""
        sent = self._sent.pop(target, None)
        if sent is not None:
            sent.forget()
            del self._targets[sent]

    def removed(self, target: Target) -> None:
        """A target is gone: what was learned of it is, too."""
        self.forget(target)
        self._retention.pop(target, None)
        self._expiring.discard(target)

    def targets(self) -> list[Target]:
        """The targets with a history."""
        return list(self._sent)

    def __len__(self) -> int:
        """The number of remembered prefixes."""
        return sum(sent.chunks for sent in self._sent.values())

    def _look_at_time(self, target: Target, learned: Retention) -> None:
        (self._expiring.discard if learned.seconds is None else self._expiring.add)(target)
        self._expire(target)

    def _expire(self, target: Target) -> None:
        learned, sent = self._retention.get(target), self._sent.get(target)
        if learned is not None and learned.seconds is not None and sent is not None:
            sent.forget_before(self._clock() - learned.seconds)
