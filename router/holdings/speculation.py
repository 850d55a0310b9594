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
from heapq import heappop, heappush
from itertools import count, repeat
from operator import sub

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
        self._held: dict[Target, _Holders] = {}
        self._numbers = count()
        self._ended_prefixes = 0
        self._ended: list[tuple[float, int, _Holders, array[int]]] = []  # a heap: the first to be let go is the first

    def hold(self, target: Target, hashes: array[int], *, lasting: bool = False) -> Callable[[], None]:
        """Hold a prompt for a target. Returns what to call when the request ended."""
        linger = max(self._linger, LASTING_SECONDS) if lasting else self._linger
        held = self._held.get(target)
        if held is None:
            held = self._held[target] = _Holders()
        held.of.update(hashes)

        def ended() -> None:
            heappush(self._ended, (self._clock() + linger, next(self._numbers), held, hashes))
            self._ended_prefixes += len(hashes)
            self._expire()

        return ended

    def overlap(self, target: Target, hashes: array[int]) -> int:
        """How many tokens of a prompt other prompts in flight on this target share from its start on."""
        held = self._held.get(target)
        if held is None or not held.of:
            return 0
        self._expire()
        holders = held.of.get
        if self._stride > 1:
            hashes = hashes[self._stride - 1 :: self._stride]
        # Whoever holds a prefix holds all shorter ones too, so the longest is found by bisection.
        return CHUNK_TOKENS * self._stride * bisect_left(hashes, True, key=lambda known: not holders(known))

    def forget(self, target: Target) -> None:
        """Nothing is expected of a target any more, because its cache was reset."""
        self._held.pop(target, None)

    def __len__(self) -> int:
        """The number of held prefixes."""
        self._expire()
        return sum(1 for held in self._held.values() for holders in held.of.values() if holders)

    def _expire(self) -> None:
        now = self._clock()
        while self._ended and (self._ended[0][0] <= now or self._ended_prefixes > MAX_ENDED):
            _, _, held, hashes = heappop(self._ended)
            self._ended_prefixes -= len(hashes)
            held.let_go(hashes)


class _Holders:
    """How many prompts hold each prefix. A prompt may have thousands, so that no step is Python's for each of them."""

    __slots__ = ("_let_go", "of")

    def __init__(self) -> None:
        self.of: Counter[int] = Counter()  # 0: nobody any more
        self._let_go = 0

    def let_go(self, hashes: array[int]) -> None:
        """One prompt holds these no more."""
        fewer = map(sub, map(self.of.__getitem__, hashes), repeat(1))
        dict.update(self.of, zip(hashes, fewer, strict=True))
        self._let_go += len(hashes)
        if self._let_go > len(self.of):  # there may be many that nobody holds
            self.of = Counter({known: holders for known, holders in self.of.items() if holders})
            self._let_go = 0
