"""The part of a prompt that a shared pool holds, and what a target reaches with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolHoldings:
    """The tokens of one prompt that a pool holds.

    - `pool`: name of the pool.
    - `block_size`: tokens per block. Bounds of intervals are multiples of it.
    - `intervals`: disjoint ranges of tokens `(start, end)` in ascending order, `end` not included.
    - `least_tokens`: the fewest tokens that a target loads.
    """

    pool: str
    block_size: int
    intervals: tuple[tuple[int, int], ...]
    least_tokens: int = 1

    def reach(self, own: int) -> int:
        """Return the length in tokens of the longest prefix, each block of which is the target's own or in the pool.

        - `own`: length in tokens of the prefix that the target itself holds, on its device or in its own tiers.
        """
        reached = own - own % self.block_size
        for start, end in self.intervals:
            if start > reached:
                break
            reached = max(reached, end)
        return max(own, reached)

    def loadable(self, own: int, most: int | None = None) -> int:
        """Return the number of tokens that a target loads from the pool for that prefix.

        `most`: the tokens of the prompt that need not be computed; None if the holdings have no others.
        """
        reach = self.reach(own)
        tokens = (reach if most is None else min(reach, most)) - own
        return tokens if tokens >= self.least_tokens else 0
