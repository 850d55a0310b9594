"""What a rank is likely to hold by what was sent to it, for ranks whose events are missing or wrong.

A rank's prompts are remembered as hashes of their prefixes, the least recently sent forgotten first, up to what its
memory holds. Whatever touches a prefix touches its shorter ones after it: so extensions are forgotten before what they
extend, and whoever holds a prefix holds all shorter ones.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict

from indexer import Target
from router.holdings.speculation import CHUNK_TOKENS

# For ranks that do not say how much they hold: an 8-billion-parameter model on a GPU of 80 GB.
DEFAULT_CAPACITY = 2**19


class RoutingHistory:
    """The prompts that were answered, by target."""

    def __init__(self) -> None:
        self._sent: dict[Target, OrderedDict[int, None]] = {}

    def remember(self, target: Target, hashes: array[int], capacity: int | None) -> None:
        """A target has seen a prompt. `capacity`: the tokens it can hold."""
        sent = self._sent.setdefault(target, OrderedDict())
        for known in reversed(hashes):
            sent[known] = None
            sent.move_to_end(known)
        for _ in range(len(sent) - (capacity or DEFAULT_CAPACITY) // CHUNK_TOKENS):
            sent.popitem(last=False)

    def overlap(self, target: Target, hashes: array[int]) -> int:
        """How many tokens of a prompt, from its start on, a target has seen and not forgotten."""
        sent = self._sent.get(target)
        if not sent:
            return 0
        return CHUNK_TOKENS * bisect_left(hashes, True, key=lambda known: known not in sent)

    def forget(self, target: Target) -> None:
        """A target holds nothing any more, or its history is not needed."""
        self._sent.pop(target, None)

    def targets(self) -> list[Target]:
        """The targets with a history."""
        return list(self._sent)

    def __len__(self) -> int:
        """The number of remembered prefixes."""
        return sum(map(len, self._sent.values()))
