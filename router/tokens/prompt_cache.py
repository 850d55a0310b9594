"""Prompts that were seen before: one that begins as a known one takes its prefix hashes over, as far as both are alike.

A conversation's next turn begins as its last. Hashing a prompt of 30,000 tokens takes as long as all else that is done
with it before it is routed; what is the same needs no hashing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from indexer.hashing import TOKEN_BYTES, PackedPrompt
from router.tokens.boundary import START, Boundary, Mark
from router.tokens.common_start import common_start

# Texts are remembered by a few of their characters, at these places and then at every so many: the next turn has the
# same at all places but the last ones.
_FIRST_PLACES = (1024, 2048, 4096)
_STEP = 8192
_CHARACTERS = 32
# Texts that only seemed to begin alike: this many are looked at.
_TRIES = 4
# Of two texts that are alike but for so small a part at their ends one is kept.
_ENDS = 8
# What it takes to remember a text under one place, and a place where it can be cut.
_PLACE_BYTES = 300
_MARK_BYTES = 130
# A prompt is hashed in blocks, and for itself in chunks: a byte a token, about.
_HASHED_TIMES = 2

_Key = tuple[int, str]


class KnownPrompt:
    """A text whose token ids are known. `marks`: where it can be cut, if that is known."""

    __slots__ = ("keys", "marks", "prompt", "size", "text")

    def __init__(self, text: str, prompt: PackedPrompt, marks: list[Mark], begun: Begun) -> None:
        """`begun`: what was known of it."""
        self.text = text
        self.prompt = prompt
        self.marks = marks
        self.keys: list[_Key] = [] if begun.known is None else begun.known.keys[: _places(begun.common)]
        self.keys.extend(_key(text, number) for number in range(len(self.keys), _places(len(text))))
        characters = len(text) * (1 if text.isascii() else 4)
        kept = _PLACE_BYTES * len(self.keys) + _MARK_BYTES * len(marks)
        self.size = characters + _HASHED_TIMES * len(prompt.tokens) + kept


class Begun:
    """What is known of a text: it begins with `common` characters of a known one.

    `marks`: where it can be cut, of what is known of it. What comes before the last of them, `cut`, has the token ids
    that it has there.
    """

    __slots__ = ("common", "cut", "known", "marks")

    def __init__(self, known: KnownPrompt | None = None, common: int = 0) -> None:
        self.known = known
        self.common = common
        self.marks: Sequence[Mark] = ()
        self.cut = START


class PromptCache:
    """Long texts with their tokens, the least recently used forgotten first. Any number of threads may use one."""

    def __init__(self, limit_bytes: int, boundary: Boundary | None = None) -> None:
        """`boundary`: where texts can be cut."""
        self._limit = limit_bytes
        self.boundary = boundary
        self._by_place: dict[_Key, KnownPrompt] = {}
        self._known: OrderedDict[int, KnownPrompt] = OrderedDict()  # by id
        self._lock = Lock()
        self.bytes = 0

    def find(self, text: str, *, plain: bool = False) -> Begun:
        """The known text that begins as this one does, as far as can be seen at once.

        `plain`: no token is put before or after it. The others cannot be cut.
        """
        best = Begun()
        tried: list[KnownPrompt] = []
        for number in range(_places(len(text)) - 1, -1, -1):
            key = _key(text, number)
            known = self._by_place.get(key)
            if known is not None and known not in tried and len(tried) < _TRIES:
                tried.append(known)
                common = common_start(text, known.text)
                if common > best.common:
                    best = Begun(known, common)
            # What ends alike, too, is found by its end, and may still be the one that begins alike up to here.
            if best.common >= key[0]:
                break
        known = best.known
        if known is not None:
            if plain and self.boundary is not None:
                best.marks = self.boundary.common_marks(known.marks, best.common)
                best.cut = best.marks[-1] if best.marks else START
            with self._lock:
                if id(known) in self._known:
                    self._known.move_to_end(id(known))
        return best

    def prompt(self, text: str, tokens: bytes, begun: Begun, *, plain: bool = False) -> PackedPrompt:
        """The prompt of a text, which is remembered. `begun`: what was known of it. `tokens`: those behind its cut."""
        known, cut = begun.known, begun.cut[1]
        if known is None:
            prompt = PackedPrompt(tokens)
        elif cut:
            before = known.prompt.tokens
            prompt = known.prompt.extended(b"".join((memoryview(before)[:cut], tokens)), cut // TOKEN_BYTES)
        else:
            prompt = known.prompt.extended(tokens, common_start(tokens, known.prompt.tokens) // TOKEN_BYTES)
        if len(text) >= _FIRST_PLACES[0]:
            boundary = self.boundary if plain else None
            marks = boundary.marks(text, prompt.tokens, begun.marks) if boundary is not None else []
            self._put(KnownPrompt(text, prompt, marks, begun), begun)
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
            for key in new.keys:
                self._by_place[key] = new
            self._known[id(new)] = new
            self.bytes += new.size
            # What goes on from all of a text but its end knows nearly all that others could go on from.
            if old is not None and id(old) in self._known and begun.common >= len(old.text) - _end(len(old.text)):
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


def _places(length: int) -> int:
    """How many places a text of this length has."""
    if length < _STEP:
        return bisect_right(_FIRST_PLACES, length)
    return len(_FIRST_PLACES) + length // _STEP


def _key(text: str, number: int) -> _Key:
    """What a text is remembered by at a place, by the number of that."""
    first = len(_FIRST_PLACES)
    place = _FIRST_PLACES[number] if number < first else (number - first + 1) * _STEP
    return place, text[place - _CHARACTERS : place]


def _end(length: int) -> int:
    """How much of a text's end is not worth another text in memory: many prompts may have a beginning in common."""
    return max(_FIRST_PLACES[0], length // _ENDS)
