"""Cached prompts: a prompt that begins like a cached one reuses its token ids and prefix hashes.

A conversation's next turn begins like the last one. Hashing a prompt of 30,000 tokens takes as long as all other work
before it is routed, and the shared part needs no hashing.

A boundary is where the text of a conversation can be cut, so that both parts have the token ids of the whole: before a
special token, as templates write one between messages. A conversation's next turn is tokenized from the last boundary
that it shares with a cached text. Everything before has the cached token ids.

Tokenizers match special tokens first, but have further rules. So a trial decides whether a boundary is safe.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Final, NamedTuple, TypeAlias

from indexer.hashing import TOKEN_BYTES, PackedPrompt, pack_tokens
from indexer.native import native_core
from router.tokens.text_encoder import AWKWARD, Encoder

_native = native_core()
Mark: TypeAlias = tuple[int, int]
START: Final = (0, 0)
# Texts with more marks are not cut, because the search would take too long.
_MOST_MARKS: Final = 2**14
_LAST: Final = 2**63 - 1
_TRIED_TOKENS = 12
# Texts are looked up by a few characters at these positions, and then at every multiple of the step. The next turn of
# a conversation is equal at all but the last positions.
_FIRST_PLACES = (1024, 2048, 4096)
_STEP = 8192
_CHARACTERS = 32
# Maximum number of entries to compare in one search.
_TRIES = 4
# If two texts differ only in this fraction at the end, one entry is kept.
_ENDS = 8
# Estimated bytes for a lookup key, and for a mark.
_PLACE_BYTES = 300
_MARK_BYTES = 130
# Estimated memory of a prompt as a multiple of its tokens, including hashes of blocks and chunks.
_HASHED_TIMES = 2
_Key = tuple[int, str]


def reference_token_places(tokens: bytes, token: int, start: int) -> list[int]:
    """Return the positions of a token in a packed prompt, in bytes, from the token boundary `start` on."""
    wanted, places = pack_tokens([token]), []
    place = tokens.find(wanted, start)
    while place >= 0:
        if place % TOKEN_BYTES == 0:  # otherwise the match spans two tokens
            places.append(place)
        place = tokens.find(wanted, place + 1)
    return places


token_places: Callable[[bytes, int, int], list[int]] = (
    reference_token_places if _native is None else _native.token_places
)


"""A position where a text can be cut: the characters before it, and the bytes of their packed token ids."""


class Boundary(NamedTuple):
    """A special token before which texts can be cut: its text and its id."""

    text: str
    token: int

    def marks(self, text: str, tokens: bytes, known: Sequence[Mark] = ()) -> list[Mark]:
        """Return where a text with these packed token ids can be cut, in order. `known` are the first marks, if cached.

        The last known mark is searched again, so that the search covers everything after it.
        """
        start, first = known[-1] if known else START
        ids = token_places(tokens, self.token, first)
        if len(known) + len(ids) > _MOST_MARKS:
            return []
        characters: list[int] = []
        place = text.find(self.text, start)
        while place >= 0 and len(characters) <= len(ids):
            characters.append(place)
            place = text.find(self.text, place + len(self.text))
        if len(characters) != len(ids):
            return []
        return [*known[:-1], *zip(characters, ids, strict=True)]

    def common_marks(self, marks: list[Mark], common: int) -> list[Mark]:
        """Return the marks that a text shares with another one that begins with the same `common` characters."""
        return marks[: bisect_right(marks, (common - len(self.text), _LAST))]


def find_boundary(encoder: Encoder, conversation: str) -> Boundary | None:
    """Return the first repeated special token of a conversation at which texts can be cut, if there is one."""
    places = {text: conversation.find(text) for text in encoder.exact if conversation.count(text) > 1}
    for text in sorted(places, key=places.__getitem__):
        (token,) = encoder.encode([text])
        if len(token) != TOKEN_BYTES:
            continue
        boundary = Boundary(text, int.from_bytes(token, "little"))
        if not _overlapped(text, encoder.special) and _passes(encoder, boundary):
            return boundary
    return None


def _overlapped(boundary: str, special: Sequence[str]) -> bool:
    """Return whether another special token can begin before the boundary or at the same character."""
    return any(
        boundary in other or any(other.endswith(boundary[:size]) for size in range(1, len(boundary)))
        for other in special
        if other != boundary
    )


def _passes(encoder: Encoder, boundary: Boundary) -> bool:
    """Return whether awkward texts have equal tokens in two parts and whole, with the boundary's id."""
    rests = [f"{boundary.text}{text}" for text in AWKWARD]
    starts = [*AWKWARD, *encoder.special[:_TRIED_TOKENS], *rests, boundary.text[:1], boundary.text[:-1]]
    for number, start in enumerate(starts):
        rest = rests[number * 7 % len(rests)]
        first, second, whole = encoder.encode([start, rest, start + rest])
        if first + second != whole or len(boundary.marks(start + rest, whole)) != (start + rest).count(boundary.text):
            return False
    return True


def reference_common_start(one: Any, other: Any) -> int:
    """Return how many characters or bytes two texts begin with alike, by binary search."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


common_start: Callable[[Any, Any], int] = reference_common_start if _native is None else _native.common


class CachedPrompt:
    """A text with its token ids. `marks` has the positions where it can be cut, if known."""

    __slots__ = ("keys", "marks", "prompt", "size", "text")

    def __init__(self, text: str, prompt: PackedPrompt, marks: list[Mark], prefix: CachedPrefix) -> None:
        self.text = text
        self.prompt = prompt
        self.marks = marks
        self.keys: list[_Key] = [] if prefix.known is None else prefix.known.keys[: _places(prefix.common)]
        self.keys.extend(_key(text, number) for number in range(len(self.keys), _places(len(text))))
        characters = len(text) * (1 if text.isascii() else 4)
        kept = _PLACE_BYTES * len(self.keys) + _MARK_BYTES * len(marks)
        self.size = characters + _HASHED_TIMES * len(prompt.tokens) + kept


class CachedPrefix:
    """The cached part of a text, of `common` characters. The text can be cut at `marks`; ids end at the last, `cut`."""

    __slots__ = ("common", "cut", "known", "marks")

    def __init__(self, known: CachedPrompt | None = None, common: int = 0) -> None:
        self.known = known
        self.common = common
        self.marks: Sequence[Mark] = ()
        self.cut = START


class PromptCache:
    """Long texts with their tokens, in least recently used order. It can be used by several threads."""

    def __init__(self, limit_bytes: int, boundary: Boundary | None = None) -> None:
        """Create a cache; `boundary` says where texts can be cut, None that they cannot."""
        self._limit = limit_bytes
        self.boundary = boundary
        self._by_place: dict[_Key, CachedPrompt] = {}
        self._known: OrderedDict[int, CachedPrompt] = OrderedDict()  # by id
        self._lock = Lock()
        self.bytes = 0

    def find(self, text: str, *, plain: bool = False) -> CachedPrefix:
        """Return the cached prefix of a text, as far as a quick search finds it.

        `plain`: no token is added before or after the text. Other texts cannot be cut.
        """
        best = CachedPrefix()
        tried: list[CachedPrompt] = []
        for number in range(_places(len(text)) - 1, -1, -1):
            key = _key(text, number)
            known = self._by_place.get(key)
            if known is not None and known not in tried and len(tried) < _TRIES:
                tried.append(known)
                common = common_start(text, known.text)
                if common > best.common:
                    best = CachedPrefix(known, common)
            # A text with an equal end matches there first, and may also share the beginning up to this position.
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

    def prompt(self, text: str, tokens: bytes, prefix: CachedPrefix, *, plain: bool = False) -> PackedPrompt:
        """Return the prompt of a text and cache it. `tokens`: the token ids after its cached prefix's cut."""
        known, cut = prefix.known, prefix.cut[1]
        if known is None:
            prompt = PackedPrompt(tokens)
        elif cut:
            before = known.prompt.tokens
            prompt = known.prompt.extended(b"".join((memoryview(before)[:cut], tokens)), cut // TOKEN_BYTES)
        else:
            prompt = known.prompt.extended(tokens, common_start(tokens, known.prompt.tokens) // TOKEN_BYTES)
        if len(text) >= _FIRST_PLACES[0]:
            boundary = self.boundary if plain else None
            marks = boundary.marks(text, prompt.tokens, prefix.marks) if boundary is not None else []
            self._put(CachedPrompt(text, prompt, marks, prefix), prefix)
        return prompt

    def prompt_for_tokens(self, tokens: bytes) -> PackedPrompt:
        """Return the prompt of token ids without a text."""
        text = tokens.decode("latin-1")
        return self.prompt(text, tokens, self.find(text))

    def _put(self, new: CachedPrompt, prefix: CachedPrefix) -> None:
        if new.size > self._limit:
            return
        old = prefix.known
        with self._lock:
            for key in new.keys:
                self._by_place[key] = new
            self._known[id(new)] = new
            self.bytes += new.size
            # The new text contains nearly all of the old one, so the old entry is of little use.
            if old is not None and id(old) in self._known and prefix.common >= len(old.text) - _end(len(old.text)):
                self._forget(old)
            while self.bytes > self._limit:
                self._forget(next(iter(self._known.values())))

    def _forget(self, known: CachedPrompt) -> None:
        del self._known[id(known)]
        self.bytes -= known.size
        for key in known.keys:
            if self._by_place.get(key) is known:
                del self._by_place[key]

    def __len__(self) -> int:
        return len(self._known)


def common_tokens(one: PackedPrompt, other: PackedPrompt) -> int:
    """Return how many tokens two prompts begin with alike."""
    return common_start(one.tokens, other.tokens) // TOKEN_BYTES


def _places(length: int) -> int:
    """Return the number of lookup positions in a text of this length."""
    if length < _STEP:
        return bisect_right(_FIRST_PLACES, length)
    return len(_FIRST_PLACES) + length // _STEP


def _key(text: str, number: int) -> _Key:
    first = len(_FIRST_PLACES)
    place = _FIRST_PLACES[number] if number < first else (number - first + 1) * _STEP
    return place, text[place - _CHARACTERS : place]


def _end(length: int) -> int:
    """Return the length of a text's end that does not justify a second entry."""
    return max(_FIRST_PLACES[0], length // _ENDS)
