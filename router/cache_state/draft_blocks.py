"""Draft-block corrections: targets whose engine computes the last block of every hit again.

vLLM does so when a draft model reads hidden states (EAGLE, MTP, DFlash): see `use_eagle_block_drop` in its config, and
`find_longest_cache_hit`. No event reports it, but the cached tokens of every answer show it. An engine's /metrics
reports that it drafts, but not by which method: drafts of n-grams leave hits whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from indexer import Target

# The answers in a row that must be off by exactly one block. A wrong correction costs one block of a few answers.
_ANSWERS = 2


class DraftBlockCorrections:
    """The corrections of all targets.

    - `tokens`: the tokens of the block to subtract from a hit, by target; only targets with a correction are keys.
    - `drafting`: the URLs of workers whose engines draft. A single answer is enough for a correction there.
    """

    def __init__(self) -> None:
        self.tokens: dict[Target, int] = {}
        self.drafting: set[str] = set()
        self._in_a_row: dict[Target, int] = {}
        self._whole: set[Target] = set()  # targets whose answers showed whole hits

    def set_drafting(self, url: str, drafts: bool) -> None:
        """Set whether the engine of the worker at `url` drafts. Removed workers do not draft."""
        if drafts:
            self.drafting.add(url)
        else:
            self.drafting.discard(url)

    def record(self, target: Target, predicted: int, cached: int, block_size: int) -> bool:
        """Compare an answer with its prediction, and return whether the target's correction changed.

        After a change, earlier predictions of the target are no longer comparable.

        - `predicted`: the predicted cached tokens, with the present correction.
        - `block_size`: the target's block size in tokens.
        """
        corrected = target in self.tokens
        if predicted - cached != (-block_size if corrected else block_size):
            if predicted or cached:  # without a hit there is no block to subtract
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
        """Apply a target's correction to others of its model that draft and have shown no whole hit; return these."""
        if target.worker not in self.drafting:
            return []
        extended = [each for each in others if each not in self.tokens and self._may_have_draft_block(each)]
        self.tokens.update(dict.fromkeys(extended, self.tokens[target]))
        return extended

    def forget(self, target: Target) -> None:
        """Forget a target that was removed."""
        self.tokens.pop(target, None)
        self._in_a_row.pop(target, None)
        self._whole.discard(target)

    def keep(self, known: Collection[Target]) -> None:
        """Forget all targets but the known ones."""
        for each in (self.tokens.keys() | self._in_a_row.keys() | self._whole) - set(known):
            self.forget(each)

    def _may_have_draft_block(self, target: Target) -> bool:
        return target.worker in self.drafting and target not in self._whole
