"""The tokens of long texts that were seen before, for those that begin alike: a conversation's next turn.

A text that begins as a known one has the same pieces (router/tokens/segments.py) up to the last cut that both must
have: whether a special token stands at a place depends on no more characters than the longest of them has. So the
tokens up to there, and the hashes made of them, are copied instead of looked up piece by piece.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

from indexer.hashing import TOKEN_BYTES, PackedPrompt
from router.apis.prefix_cache import PrefixCache, common_places

# Of shorter texts all pieces are looked up.
MIN_CHARACTERS = 2048


class KnownText:
    """A text whose tokens are known. `cuts`: where its pieces begin, in characters; `tokens_before`: in tokens."""

    def __init__(
        self, whole: str, prompt: PackedPrompt, cuts: array[int], tokens_before: array[int], size: int
    ) -> None:
        self.whole = whole
        self.prompt = prompt
        self.cuts = cuts
        self.tokens_before = tokens_before
        self.size = size


class CachedBeginning(NamedTuple):
    """What is known of a text: its first `pieces` pieces, of so many characters and tokens; or `whole`, all of it."""

    known: KnownText | None = None
    pieces: int = 0
    characters: int = 0
    tokens: int = 0
    whole: bool = False


_NOTHING = CachedBeginning()


class TokenCache:
    """Long texts seen before, with their tokens. Any number of threads may use one."""

    def __init__(self, limit_bytes: int, longest_special: int) -> None:
        """`longest_special`: the characters of the longest token that is looked for in texts."""
        self._known: PrefixCache = PrefixCache(limit_bytes)
        self._longest = longest_special

    @property
    def size(self) -> int:
        """What they take, in bytes."""
        return self._known.bytes

    def beginning(self, text: str) -> CachedBeginning:
        """What is known of a text."""
        if len(text) < MIN_CHARACTERS:
            return _NOTHING
        return self._known.find(text, lambda known: self._begun(text, known)) or _NOTHING

    def _begun(self, text: str, known: KnownText) -> CachedBeginning | None:
        if text == known.whole:
            return CachedBeginning(known, whole=True)
        cuts, longest = known.cuts, self._longest
        # Cuts that could be others if the known text went on otherwise are left out.
        sure = bisect_right(cuts, len(known.whole) - longest)
        sure = common_places(text, known.whole, cuts, sure, longest)
        return CachedBeginning(known, sure - 1, cuts[sure - 1], known.tokens_before[sure - 1]) if sure else None

    def tokenized(self, text: str, begun: CachedBeginning, pieces: list[str], token_ids: list[bytes]) -> PackedPrompt:
        """The prompt of a text, which is remembered.

        `pieces` and their packed `token_ids` are those after what is known of it.
        """
        known = begun.known
        if known is None:
            prompt = PackedPrompt(b"".join(token_ids))
        elif begun.whole:
            return known.prompt
        else:
            before = memoryview(known.prompt.tokens)[: begun.tokens * TOKEN_BYTES]
            prompt = known.prompt.extended(b"".join([before, *token_ids]), begun.tokens)
        if len(text) >= MIN_CHARACTERS:
            self._remember(text, prompt, begun, pieces, token_ids)
        return prompt

    def _remember(
        self, text: str, prompt: PackedPrompt, begun: CachedBeginning, pieces: list[str], token_ids: list[bytes]
    ) -> None:
        known = begun.known
        cuts = known.cuts[: begun.pieces] if known else array("I")
        tokens_before = known.tokens_before[: begun.pieces] if known else array("I")
        cuts.extend(_starts(begun.characters, map(len, pieces)))
        tokens_before.extend(_starts(begun.tokens, (len(ids) // TOKEN_BYTES for ids in token_ids)))
        # Every prompt is hashed once more, in chunks: a byte for each token, about.
        size = sys.getsizeof(text) + len(prompt.tokens) + len(prompt) + prompt.hash_bytes + len(cuts) * 8
        # What goes on from all of a known text but its very end knows all that others could go on from as well.
        instead = known is not None and begun.pieces >= len(known.cuts) - 2
        new = KnownText(text, prompt, cuts, tokens_before, size)
        self._known.put(new, known, begun.characters, instead=instead)


def _starts(first: int, lengths: Iterable[int]) -> Iterable[int]:
    """Where things begin that follow each other."""
    starts = list(accumulate(lengths, initial=first))
    starts.pop()
    return starts
