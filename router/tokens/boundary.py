"""Boundaries where the text of a conversation can be cut, so that both parts have the token ids of the whole.

A boundary is before a special token, as templates write one between messages. A conversation's next turn is tokenized
from the last boundary that it shares with a cached text. Everything before has the cached token ids.

Tokenizers match special tokens first, but have further rules. So a trial decides whether a boundary is safe.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

from indexer.hashing import TOKEN_BYTES, pack_tokens
from indexer.native import native_core
from router.tokens.text_encoder import AWKWARD, Encoder


def reference_token_places(tokens: bytes, token: int, start: int) -> list[int]:
    """Return the positions of a token in a packed prompt, in bytes, from the token boundary `start` on."""
    wanted, places = pack_tokens([token]), []
    place = tokens.find(wanted, start)
    while place >= 0:
        if place % TOKEN_BYTES == 0:  # otherwise the match spans two tokens
            places.append(place)
        place = tokens.find(wanted, place + 1)
    return places


_native = native_core()
token_places: Callable[[bytes, int, int], list[int]] = (
    reference_token_places if _native is None else _native.token_places
)


Mark: TypeAlias = tuple[int, int]
"""A position where a text can be cut: the characters before it, and the bytes of their packed token ids."""

START: Final = (0, 0)
# Texts with more marks are not cut, because the search would take too long.
_MOST_MARKS: Final = 2**14
_LAST: Final = 2**63 - 1
_TRIED_TOKENS = 12


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
