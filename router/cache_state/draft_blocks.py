"""Which ranks compute the last block of every hit again, and so find one block less than they hold.

vLLM does so with drafts made of hidden states (EAGLE, MTP, DFlash): `use_eagle_block_drop` in its config, and
`find_longest_cache_hit`. No event says so, but every answer does. That an engine drafts at all is in its /metrics, but
not how: drafts of n-grams leave hits whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from indexer import Target

# So many answers in a row that are off by just a block. To be wrong about it costs that block, and until two more.
_ANSWERS = 2


class DraftBlockCorrections:
    """What to leave out of a hit. `tokens`: those of a block, by target, for such targets alone. `drafting`: the URLs
    of workers that say that they draft, of which the first hit is believed, and by others of the same model, too."""

    def __init__(self) -> None:
        self.tokens: dict[Target, int] = {}
        self.drafting: set[str] = set()
        self._in_a_row: dict[Target, int] = {}
        self._whole: set[Target] = set()  # that found all of what they hold

    def set_drafting(self, url: str, drafts: bool) -> None:
        """Whether a worker's engine drafts; one that is removed does not."""
        if drafts:
            self.drafting.add(url)
        else:
            self.drafting.discard(url)

    def record(self, target: Target, predicted: int, cached: int, block_size: int) -> bool:
        """A target found `cached` tokens. Whether something was learned: predictions before tell nothing any more."""
        corrected = target in self.tokens
        if predicted - cached != (-block_size if corrected else block_size):
            if predicted or cached:  # else there was nothing to leave out
                self._in_a_row.pop(target, None)
                if predicted == cached and not corrected:
                    self._whole.add(target)
            return False
        answers = self._in_a_row[target] = self._in_a_row.get(target, 0) + 1
        if answers < (1 if not corrected and self._may_have_draft_block(target) else _ANSWERS):
            return False
        del self._in_a_row[target]
        if corrected:
            del self.tokens[target]
            self._whole.add(target)
        else:
            self.tokens[target] = block_size
        return True

    def extend(self, target: Target, others: Iterable[Target]) -> list[Target]:
        """Let others of a model do as one of it was seen to, where both draft; those that had not been seen to."""
        if target.worker not in self.drafting:
            return []
        extended = [each for each in others if each not in self.tokens and self._may_have_draft_block(each)]
        self.tokens.update(dict.fromkeys(extended, self.tokens[target]))
        return extended

    def forget(self, target: Target) -> None:
        """A target was removed."""
        self.tokens.pop(target, None)
        self._in_a_row.pop(target, None)
        self._whole.discard(target)

    def keep(self, known: Collection[Target]) -> None:
        """Forget all other targets."""
        for each in (self.tokens.keys() | self._in_a_row.keys() | self._whole) - set(known):
            self.forget(each)

    def _may_have_draft_block(self, target: Target) -> bool:
        return target.worker in self.drafting and target not in self._whole
