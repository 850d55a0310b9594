"""Tokenizing piece by piece: a text is cut at special tokens, and pieces seen before are not tokenized again.

A tokenizer looks for its special tokens first and treats what stands between two of them by itself. So the next turn of
a conversation costs what is new in it. That holds for most tokenizers, not for all (one may treat the start of a text
in its own way after a special token, too): router/tokens/tokenizer_check.py tries one out when it is loaded.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any, NamedTuple

from indexer.hashing import PackedPrompt, pack_tokens
from router.errors import TooLongForNowError
from router.tokens.segment_cache import SegmentCache
from router.tokens.token_cache import TokenCache

# The packed token ids of texts, without those that begin or end every text.
Encode = Callable[[list[str]], list[bytes]]

# Pieces that are new and this short together are tokenized one by one; tokenizers share longer work between threads,
# whose waking takes longer than tokenizing so much.
_ONE_BY_ONE_CHARACTERS = 4096
# In a text with so many of the character that special tokens begin with, it is no longer a sign of one.
_VAIN = 64


class Ends(NamedTuple):
    """The token ids that a tokenizer puts before and after every text, such as <s>."""

    before: list[int]
    after: list[int]


def ends_of(backend: Any) -> Ends:
    """The ends that a tokenizer (of `tokenizers`) adds when it is told to add special tokens."""
    bare, full = (backend.encode("a", add_special_tokens=add).ids for add in (False, True))
    start = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)
    return Ends(full[:start], full[start + len(bare) :])


class Cutter:
    """Cuts texts before each special token of a tokenizer (of `tokenizers`).

    All added tokens that are looked for in the raw text count when deciding what stands where, as in the tokenizer the
    first and longest one wins. A cut is made only before those that leave their surroundings alone: which take no
    space from beside them, need no word's end there, and don't look like a part of a word to others that do.
    """

    def __init__(self, backend: Any) -> None:
        added = [token for token in backend.get_added_tokens_decoder().values() if token.content]
        raw = [token for token in added if not token.normalized]
        self.boundaries = [
            token.content
            for token in raw
            if not (token.lstrip or token.rstrip or token.single_word) and _stands_apart(token.content)
        ]
        self._boundaries = frozenset(self.boundaries)
        self.longest = max((len(token.content) for token in raw), default=0)
        self._raw = re.compile(_longest_of(token.content for token in raw))
        self._added = re.compile(_longest_of(token.content for token in added))
        # The character that all of them begin with, if it is one: looking for that takes next to no time.
        self._raw_first = _only_first(raw)
        self._added_first = _only_first(added)

    def cut(self, text: str, start: int = 0) -> list[str]:
        """The pieces of a text; from `start` on, which is one of its cuts.

        Each but the first begins with a special token.
        """
        if not self.boundaries:
            return [text[start:]]
        starts = self._starts(text, start)
        if not starts:
            return [text[start:]]
        if starts[0] != start:
            starts.insert(0, start)
        starts.append(len(text))
        return [text[starts[number] : starts[number + 1]] for number in range(len(starts) - 1)]

    def _starts(self, text: str, at: int) -> list[int]:
        """Where cuts are made, from a place on."""
        starts: list[int] = []
        vain = _VAIN if self._raw_first else 0
        while vain:
            at = text.find(self._raw_first, at)
            if at < 0:
                return starts
            match = self._raw.match(text, at)
            if match is None:
                at += 1
                vain -= 1
                continue
            if match.group() in self._boundaries:
                starts.append(at)
            at = match.end()
        starts += [match.start() for match in self._raw.finditer(text, at) if match.group() in self._boundaries]
        return starts

    def special_token(self, piece: str) -> str:
        """The special token that a piece begins with; empty when it begins with none."""
        match = self._raw.match(piece) if self.boundaries else None
        return match.group() if match and match.group() in self._boundaries else ""

    def has_added_token(self, text: str) -> bool:
        """Whether the content of any added token stands in a text."""
        if self._added_first and self._added_first not in text:
            return False
        match = self._added.search(text)
        return bool(match and match.group())


class SegmentedEncoder:
    """Token ids of texts, piece by piece. Any number of threads may use one."""

    def __init__(self, encode: Encode, cutter: Cutter, ends: Ends, cache_bytes: int, ascii_speed: int = 1) -> None:
        """`ascii_speed`: how many times faster than other text `encode` takes ASCII.

        `cache_bytes` bounds what is kept of the texts seen before: half of it for pieces, half for whole texts.
        """
        self._encode = encode
        self._ascii_speed = ascii_speed
        self._cutter = cutter
        self._before = pack_tokens(ends.before)
        self._after = pack_tokens(ends.after)
        self._pieces = SegmentCache(cache_bytes - cache_bytes // 2)
        self._texts = TokenCache(cache_bytes // 2, cutter.longest)

    @property
    def cached_bytes(self) -> int:
        """What the texts seen before take."""
        return self._pieces.bytes + self._texts.size

    def encode(self, texts: list[str], *, add_special_tokens: bool, at_most: int = sys.maxsize) -> list[PackedPrompt]:
        """The token ids of each text.

        Raises TooLongForNowError when more than `at_most` characters of them are new, not counting ASCII in full where
        that is faster.
        """
        begun = [self._texts.beginning(text) for text in texts]
        cut: list[list[str]] = []
        for number, text in enumerate(texts):
            beginning = begun[number]
            cut.append([] if beginning.whole else self._cutter.cut(text, beginning.characters))
        known, new = self._pieces.get(cut[0] if len(cut) == 1 else list(chain.from_iterable(cut)))
        if new:
            if self._work(new) > at_most:
                raise TooLongForNowError
            known |= self._encoded(new)
        prompts: list[PackedPrompt] = []
        for number, text in enumerate(texts):
            pieces = cut[number]
            token_ids = [known[piece] for piece in pieces]
            prompts.append(self._texts.tokenized(text, begun[number], pieces, token_ids))
        if add_special_tokens and (self._before or self._after):
            return [PackedPrompt(self._before + prompt.tokens + self._after) for prompt in prompts]
        return prompts

    def _work(self, pieces: list[str]) -> int:
        work = 0
        for piece in pieces:
            work += len(piece) // self._ascii_speed if piece.isascii() else len(piece)
        return work

    def _encoded(self, new: list[str]) -> dict[str, bytes]:
        if sum(map(len, new)) <= _ONE_BY_ONE_CHARACTERS:
            encoded = [self._encode([piece])[0] for piece in new]
        else:
            encoded = self._encode(new)
        added = dict(zip(new, encoded, strict=True))
        self._pieces.put(added)
        return added


def _stands_apart(content: str) -> bool:
    return not (content[0].isalnum() or content[0].isspace() or content[0] == "_")


def _only_first(tokens: list[Any]) -> str:
    """The character that tokens begin with; empty where it is not the same for all, or there are none."""
    firsts = {token.content[0] for token in tokens}
    return firsts.pop() if len(firsts) == 1 else ""


def _longest_of(words: Iterable[str]) -> str:
    """An expression for the longest of some words that stands at a place. A tree, since there may be thousands."""
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return _expression(tree)


def _expression(node: dict[str, Any]) -> str:
    prefix = ""
    while len(node) == 1 and "" not in node:  # a path without branches, however long
        ((character, node),) = node.items()
        prefix += re.escape(character)
    branches = [re.escape(character) + _expression(rest) for character, rest in node.items() if character]
    if not branches:
        return prefix
    return f"{prefix}(?:{'|'.join(branches)}){'?' if '' in node else ''}"
