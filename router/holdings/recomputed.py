"""Which ranks compute the last block of every hit again, and so find one block less than they hold.

vLLM does so with drafts made of hidden states (EAGLE, MTP, DFlash): `use_eagle_block_drop` in its config, and
`find_longest_cache_hit`. No event says so, but every answer does.
"""

from __future__ import annotations

from indexer import Target

# So many answers in a row that are off by just a block. To be wrong about it costs that block, and until two more.
_ANSWERS = 2


class RecomputedBlocks:
    """What to leave out of a hit. `tokens`: those of a block, by target, for such targets alone."""

    def __init__(self) -> None:
        self.tokens: dict[Target, int] = {}
        self._in_a_row: dict[Target, int] = {}

    def answered(self, target: Target, predicted: int, cached: int, block_size: int) -> bool:
        """A target found `cached` tokens. Whether something was learned: predictions before tell nothing any more."""
        left_out = target in self.tokens
        if predicted - cached != (-block_size if left_out else block_size):
            if predicted or cached:  # else there was nothing to leave out
                self._in_a_row.pop(target, None)
            return False
        answers = self._in_a_row[target] = self._in_a_row.get(target, 0) + 1
        if answers < _ANSWERS:
            return False
        del self._in_a_row[target]
        if left_out:
            del self.tokens[target]
        else:
            self.tokens[target] = block_size
        return True

    def forget(self, target: Target) -> None:
        """A target was removed."""
        self.tokens.pop(target, None)
        self._in_a_row.pop(target, None)
