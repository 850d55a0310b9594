"""What a rank is likely to hold by what was sent to it, for ranks whose events are missing or wrong.

A rank's prompts are remembered as hashes of their prefixes, the least recently sent forgotten first, up to what its
memory holds.
"""

from __future__ import annotations

from array import array

from indexer import Target
from router.holdings.recent_prefixes import RecentPrefixes
from router.holdings.shared_prefixes import SharedPrefixes
from router.holdings.speculation import CHUNK_TOKENS

# For ranks that do not say how much they hold: an 8-billion-parameter model on a GPU of 80 GB.
DEFAULT_CAPACITY = 2**19


class RoutingHistory:
    """The prompts that were answered, by target."""

    def __init__(self) -> None:
        self._prefixes: SharedPrefixes[RecentPrefixes] = SharedPrefixes()
        self._sent: dict[Target, RecentPrefixes] = {}
        self._targets: dict[RecentPrefixes, Target] = {}

    def remember(self, target: Target, hashes: array[int], capacity: int | None) -> None:
        """A target has seen a prompt. `capacity`: the tokens it can hold."""
        sent = self._sent.get(target)
        if sent is None:
            sent = self._sent[target] = RecentPrefixes(self._prefixes)
            self._targets[sent] = target
        sent.remember(hashes, (capacity or DEFAULT_CAPACITY) // CHUNK_TOKENS)

    def overlaps(self, hashes: array[int]) -> dict[Target, int]:
        """How many tokens of a prompt, from its start on, each target has seen and not forgotten, if any."""
        if not self._sent:
            return {}
        return {self._targets[sent]: CHUNK_TOKENS * chunks for sent, chunks in self._prefixes.longest(hashes).items()}

    def forget(self, target: Target) -> None:
        """A target holds nothing any more, or its history is not needed."""
        sent = self._sent.pop(target, None)
        if sent is not None:
            sent.forget()
            del self._targets[sent]

    def targets(self) -> list[Target]:
        """The targets with a history."""
        return list(self._sent)

    def __len__(self) -> int:
        """The number of remembered prefixes."""
        return sum(sent.chunks for sent in self._sent.values())
