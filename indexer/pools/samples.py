"""A question to a pool: whether it still has the blocks of a prompt that were reported to be there."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from indexer.pools.holdings import PoolHoldings

# Maximum number of keys in one question.
MOST_KEYS: Final = 256


def sampled_positions(blocks: int, parts: int) -> list[int]:
    """Return evenly spaced positions in `blocks` blocks of `parts` keys each, as many as a question has keys for.

    The last block is always one of them.
    """
    step = -(-blocks // max(MOST_KEYS // parts, 1))
    return list(range(blocks - 1, -1, -step))[::-1]


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The keys of some blocks of a prompt, which show whether a pool has the others.

    - `reported`: what the pool reported of the prompt.
    - `blocks`: numbers of the reported blocks.
    - `sampled`: positions in `blocks`, each with the keys of its block. The last block is sampled.
    """

    reported: PoolHoldings
    blocks: Sequence[int]
    sampled: Sequence[tuple[int, Sequence[str]]]

    @property
    def keys(self) -> list[str]:
        """All keys of the question."""
        return [key for _, keys in self.sampled for key in keys]

    def confirmed(self, present: Collection[str]) -> PoolHoldings:
        """Return the holdings that the present keys confirm. Blocks between two sampled ones need both."""
        size, ranges = self.reported.block_size, list[tuple[int, int]]()
        before, begin = True, 0
        for position, keys in self.sampled:
            here = all(key in present for key in keys)
            for number in self.blocks[begin if before else position : position + 1] if here else ():
                if ranges and ranges[-1][1] == number * size:
                    ranges[-1] = ranges[-1][0], (number + 1) * size
                else:
                    ranges.append((number * size, (number + 1) * size))
            before, begin = here, position + 1
        return replace(self.reported, intervals=tuple(ranges))
