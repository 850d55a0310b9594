"""Prompts in flight count as cached soon: an engine's events arrive around a request's first byte, or later.

Until then siblings of a prompt would scatter. So every routed prompt is held here for its target, as hashes of its
prefixes, until it ended and its events have had the time to arrive.
"""

from __future__ import annotations

import time
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

from sortedcontainers import SortedDict

from indexer import DEFAULT_TENANT, Target
from indexer.hashing import Namespace, PackedPrompt, namespace_hash

# Finer than most engines' blocks, so that rounding down to a block loses nothing.
CHUNK_TOKENS = 16


def prompt_hashes(
    model: str, adapter: str | None, cache_salt: str | None, token_ids: Sequence[int] | PackedPrompt
) -> array[int]:
    """A hash for each prefix of a prompt that is a whole number of chunks.

    Where blocks are as large as chunks these are the index's hashes, unless those depend on a secret.
    """
    seed = namespace_hash(Namespace(model, DEFAULT_TENANT, adapter, cache_salt, CHUNK_TOKENS))
    prompt = PackedPrompt.of(token_ids)
    return prompt.hashes(seed, CHUNK_TOKENS, len(prompt) // CHUNK_TOKENS)


# Prompts that no event tells of are held so long, and so many prefixes of prompts that ended.
LASTING_SECONDS = 600.0
MAX_ENDED = 1 << 20


class SpeculativeHoldings:
    """The prompts in flight, by target. A prompt is let go `linger` seconds after it ended, a lasting one later.

    `stride`: of so many prefixes of a prompt one is held.
    """

    def __init__(self, linger: float, clock: Callable[[], float] = time.monotonic, stride: int = 1) -> None:
        self._linger = linger
        self._clock = clock
        self._stride = stride
        self._held: dict[Target, Counter[int]] = {}
        self._numbers = count()
        self._ended_prefixes = 0
        self._ended: SortedDict[tuple[float, int], tuple[Counter[int], array[int]]] = SortedDict()

    def hold(self, target: Target, hashes: array[int], *, lasting: bool = False) -> Callable[[], None]:
        """Hold a prompt for a target. Returns what to call when the request ended."""
        linger = max(self._linger, LASTING_SECONDS) if lasting else self._linger
        held = self._held.setdefault(target, Counter())
        held.update(hashes)

        def ended() -> None:
            self._ended[self._clock() + linger, next(self._numbers)] = (held, hashes)
            self._ended_prefixes += len(hashes)
            self._expire()

        return ended

    def overlap(self, target: Target, hashes: array[int]) -> int:
        """How many tokens of a prompt other prompts in flight on this target share from its start on."""
        held = self._held.get(target)
        if not held:
            return 0
        self._expire()
        if self._stride > 1:
            hashes = hashes[self._stride - 1 :: self._stride]
        # Whoever holds a prefix holds all shorter ones too, so the longest is found by bisection.
        return CHUNK_TOKENS * self._stride * bisect_left(hashes, True, key=lambda known: known not in held)

    def forget(self, target: Target) -> None:
        """Nothing is expected of a target any more, because its cache was reset."""
        self._held.pop(target, None)

    def __len__(self) -> int:
        """The number of held prefixes."""
        self._expire()
        return sum(map(len, self._held.values()))

    def _expire(self) -> None:
        now = self._clock()
        while self._ended and (self._ended.peekitem(0)[0][0] <= now or self._ended_prefixes > MAX_ENDED):
            _, (held, hashes) = self._ended.popitem(0)
            self._ended_prefixes -= len(hashes)
            for known in hashes:
                held[known] -= 1
                if not held[known]:
                    del held[known]
