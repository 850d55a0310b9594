"""The difference of two turns of a session: where their tokens begin to differ, and how many are equal behind it.

Tokens are packed, four bytes each. A turn that continues the one before it, or that has other text, has no difference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Final

from indexer.hashing import TOKEN_BYTES
from router.apis.messages import BILLING_HEADER

# The fewest equal tokens that make text the same behind a difference.
LEAST_EQUAL: Final = 64
# Tokens that are searched for in the other turn, and how far behind the difference it may continue there.
_ANCHOR: Final = 32
_FARTHEST: Final = 8192
_STEP: Final = 1.25
# Tokens before and behind a difference that are decoded with it, and the most tokens of the difference.
_BEFORE: Final = 64
_BEHIND: Final = 16
_LONGEST: Final = 512
_EXCERPT: Final = 80

_DATE: Final = re.compile(
    r"\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4}|\d\d?:\d\d|\b(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b"
    r"|\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\.? \d|\b1[0-9]{9}(?:[0-9]{3})?\b",
    re.IGNORECASE,
)
_NUMBER: Final = re.compile(r"\d+")
_RANDOM: Final = re.compile(r"(?=[^\s]*\d)(?=[^\s]*[a-zA-Z])[\w-]{6,}")
_WORD: Final = re.compile(r"\S+")


class Difference:
    """The first difference of two turns. Numbers are tokens.

    - `place`: the tokens before it, which are equal.
    - `removed`, `added`: the tokens that differ, of the earlier and of the later turn.
    - `equal`: the equal tokens behind it.
    """

    __slots__ = ("added", "equal", "place", "removed")

    def __init__(self, place: int, removed: int, added: int, equal: int) -> None:
        self.place = place
        self.removed = removed
        self.added = added
        self.equal = equal


def find_difference(earlier: bytes, later: bytes) -> Difference | None:
    """Return the first difference of two turns; None if `later` continues `earlier`, or has other text behind it."""
    place = _common(earlier, 0, later, 0)
    left, right = len(earlier) // TOKEN_BYTES - place, len(later) // TOKEN_BYTES - place
    best: Difference | None = None
    skip, wanted = 0.0, LEAST_EQUAL
    while skip < min(_FARTHEST, left - _ANCHOR) and right >= _ANCHOR:
        at = place + int(skip)
        found = _continuation(earlier, at, later, place)
        skip = max(skip + 1, skip * _STEP)
        if found is None:
            continue
        equal = _common(earlier, at, later, found)
        while at > place and found > place and _token(earlier, at - 1) == _token(later, found - 1):
            at, found, equal = at - 1, found - 1, equal + 1
        if equal >= wanted:
            wanted, best = equal + 1, Difference(place, at - place, found - place, equal)
            if equal >= left - (at - place) - LEAST_EQUAL:
                break
    return best


def _continuation(earlier: bytes, at: int, later: bytes, place: int) -> int | None:
    """Return where the tokens of `earlier` at a place continue in `later`, behind `place`; None if nowhere near."""
    anchor = earlier[at * TOKEN_BYTES : (at + _ANCHOR) * TOKEN_BYTES]
    start, end = place * TOKEN_BYTES, (at + _FARTHEST) * TOKEN_BYTES
    while (start := later.find(anchor, start, end)) >= 0:
        if start % TOKEN_BYTES == 0:
            return start // TOKEN_BYTES
        start += 1
    return None


def _common(one: bytes, at: int, other: bytes, begin: int) -> int:
    """Return the number of equal tokens of `one` from `at` and of `other` from `begin`."""
    one_start, other_start = at * TOKEN_BYTES, begin * TOKEN_BYTES
    low, high = 0, min(len(one) - one_start, len(other) - other_start) // TOKEN_BYTES
    one_view, other_view = memoryview(one), memoryview(other)
    while low < high:  # the first `low` are equal
        middle = (low + high + 1) // 2
        first, last = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if one_view[one_start + first : one_start + last] == other_view[other_start + first : other_start + last]:
            low = middle
        else:
            high = middle - 1
    return low


def _token(tokens: bytes, at: int) -> bytes:
    return tokens[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES]


class Cause:
    """The likely cause of a difference in words, and the differing text of both turns; "" if texts are unknown."""

    __slots__ = ("added", "name", "removed")

    def __init__(self, name: str, removed: str = "", added: str = "") -> None:
        self.name = name
        self.removed = removed
        self.added = added


def likely_cause(difference: Difference, earlier: bytes, later: bytes, text_of: Callable[[bytes], str | None]) -> Cause:
    """Return the likely cause of a difference. `text_of`: returns the text of tokens, if it is known."""
    place, behind = difference.place, min(difference.equal, _BEHIND)
    start = max(place - _BEFORE, 0)
    removed = min(difference.removed, _LONGEST) + behind + place
    added = min(difference.added, _LONGEST) + behind + place
    of_earlier = earlier[place * TOKEN_BYTES : (place + difference.removed) * TOKEN_BYTES]
    of_later = later[place * TOKEN_BYTES : (place + difference.added) * TOKEN_BYTES]
    texts = (
        text_of(earlier[start * TOKEN_BYTES : removed * TOKEN_BYTES]),
        text_of(later[start * TOKEN_BYTES : added * TOKEN_BYTES]),
    )
    one, other = texts
    if one is None or other is None:
        return Cause("a list in another order" if _reordered(of_earlier, of_later) else "unknown")
    words = _differing(one, other)
    name = _name(one, other, *words)
    if name == "unknown" and _reordered(of_earlier, of_later):
        name = "a list in another order, such as tools or files"
    elif name == "unknown" and not (difference.removed and difference.added):
        name = "text that is added to earlier messages" if difference.added else "text that is removed from history"
    return Cause(name, words[0][:_EXCERPT], words[1][:_EXCERPT])


def _name(one: str, other: str, removed: str, added: str) -> str:
    around = one + other
    if BILLING_HEADER in around:
        return "the billing line of Claude Code"
    if "cache_control" in around:
        return "cache marks that move"
    if len(removed) > 2 * _EXCERPT or len(added) > 2 * _EXCERPT:
        return "unknown"
    if _DATE.search(removed) or _DATE.search(added):
        return "a date or time"
    if removed and added:
        if "/" in removed + added or "\\" in removed + added:
            return "a path, such as the working directory"
        if _NUMBER.search(removed) and _NUMBER.sub("0", removed) == _NUMBER.sub("0", added):
            return "a counter"
        if _RANDOM.search(removed) and _RANDOM.search(added):
            return "a random id"
    return "unknown"


def _differing(one: str, other: str) -> tuple[str, str]:
    """Return the words of two texts between their common start and their common end."""
    start, length = 0, min(len(one), len(other))
    while start < length and one[start] == other[start]:
        start += 1
    end = 0
    while end < length - start and one[-1 - end] == other[-1 - end]:
        end += 1
    return _whole_words(one, start, len(one) - end), _whole_words(other, start, len(other) - end)


def _whole_words(text: str, start: int, end: int) -> str:
    while start > 0 and not text[start - 1].isspace():
        start -= 1
    while end < len(text) and not text[end].isspace():
        end += 1
    return text[start:end]


def _reordered(one: bytes, other: bytes) -> bool:
    """Return whether two runs have the same tokens in another order."""
    if len(one) != len(other) or len(one) < 2 * TOKEN_BYTES:
        return False
    return Counter(memoryview(one).cast("I")) == Counter(memoryview(other).cast("I"))
