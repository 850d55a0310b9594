"""Prompts that were seen before: one that begins as a known one takes its prefix hashes over, as far as both are alike.

A conversation's next turn begins as its last. Hashing a prompt of 30,000 tokens takes as long as all else that is done
with it before it is routed; what is the same needs no hashing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from threading import Lock
from typing import NamedTuple

from indexer.hashing import TOKEN_BYTES, PackedPrompt
from router.tokens.common_start import common_start

# Texts are remembered by a few of their characters, at these places and then at every so many: the next turn has the
# same at all places but the last ones.
_FIRST_PLACES = (1024, 2048, 4096)
_STEP = 8192
_CHARACTERS = 32
# Texts that only seemed to begin alike: this many are looked at.
_TRIES = 4
# What it takes to remember a text under one place.
_PLACE_BYTES = 300
# A prompt is hashed in blocks, and for itself in chunks: a byte a token, about.
_HASHED_TIMES = 2

_Key = tuple[int, str]


class KnownPrompt:
    """A text whose token ids are known. `plain`: those are all its own, none is put before or after."""

    __slots__ = ("keys", "plain", "prompt", "size", "text")

    def __init__(self, text: str, prompt: PackedPrompt, plain: bool) -> None:
        self.text = text
        self.prompt = prompt
        self.plain = plain
        self.keys = [(place, text[place - _CHARACTERS : place]) for place in _places(len(text))]
        characters = len(text) * (1 if text.isascii() else 4)
        self.size = characters + _HASHED_TIMES * len(prompt.tokens) + _PLACE_BYTES * len(self.keys)


class Begun(NamedTuple):
    """What is known of a text: it begins with `common` characters of a known one."""

    known: KnownPrompt | None = None
    common: int = 0


class PromptCache:
    """Long texts with their tokens, the least recently used forgotten first. Any number of threads may use one."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._by_place: dict[_Key, KnownPrompt] = {}
        self._known: OrderedDict[int, KnownPrompt] = OrderedDict()  # by id
        self._lock = Lock()
        self.bytes = 0

    def find(self, text: str) -> Begun:
        """The known text that begins as this one does, as far as can be seen at once."""
        best = Begun()
        tried: list[KnownPrompt] = []
        for place in reversed(_places(len(text))):
            known = self._by_place.get((place, text[place - _CHARACTERS : place]))
            if known is not None and known not in tried and len(tried) < _TRIES:
                tried.append(known)
                common = common_start(text, known.text)
                if common > best.common:
                    best = Begun(known, common)
            # What ends alike, too, is found by its end, and may still be the one that begins alike up to here.
            if best.common >= place:
                break
        if best.known is not None:
            with self._lock:
                if id(best.known) in self._known:
                    self._known.move_to_end(id(best.known))
        return best

    def prompt(self, text: str, tokens: bytes, begun: Begun, plain: bool = False) -> PackedPrompt:
        """The prompt of a text, which is remembered. `begun`: what was known of it. `plain`: as of `KnownPrompt`."""
        known = begun.known
        if known is None:
            prompt = PackedPrompt(tokens)
        else:
            common = common_start(tokens, known.prompt.tokens)
            prompt = known.prompt.extended(tokens, common // TOKEN_BYTES)
        if len(text) >= _FIRST_PLACES[0]:
            self._put(KnownPrompt(text, prompt, plain), begun)
        return prompt

    def of_tokens(self, tokens: bytes) -> PackedPrompt:
        """The prompt of token ids that no text was kept of."""
        text = tokens.decode("latin-1")
        return self.prompt(text, tokens, self.find(text))

    def _put(self, new: KnownPrompt, begun: Begun) -> None:
        if new.size > self._limit:
            return
        old = begun.known
        with self._lock:
            self._by_place.update(dict.fromkeys(new.keys, new))
            self._known[id(new)] = new
            self.bytes += new.size
            # What goes on from all of a text but its very end knows all that others could go on from.
            if old is not None and id(old) in self._known and begun.common >= len(old.text) - _FIRST_PLACES[0]:
                self._forget(old)
            while self.bytes > self._limit:
                self._forget(next(iter(self._known.values())))

    def _forget(self, known: KnownPrompt) -> None:
        del self._known[id(known)]
        self.bytes -= known.size
        for key in known.keys:
            if self._by_place.get(key) is known:
                del self._by_place[key]

    def __len__(self) -> int:
        """The number of texts."""
        return len(self._known)


def common_tokens(one: PackedPrompt, other: PackedPrompt) -> int:
    """How many tokens two prompts begin with alike."""
    return common_start(one.tokens, other.tokens) // TOKEN_BYTES


def _places(length: int) -> list[int]:
    return [*_FIRST_PLACES[: bisect_right(_FIRST_PLACES, length)], *range(_STEP, length + 1, _STEP)]
