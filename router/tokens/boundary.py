"""Where the text of a conversation can be cut, so that its start and its rest have the token ids of the whole.

That is before a special token, as templates put one between messages. A conversation's next turn is tokenized from the
last such place that it has in common with a text before: what comes earlier has the token ids that it had there.

Tokenizers find special tokens before anything else, but have more rules than one can think of. A trial decides.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

from indexer.hashing import TOKEN_BYTES
from router.tokens.text_encoder import Encoder
from router.tokens.token_places import token_places
from router.tokens.tokenizer_check import AWKWARD

Mark: TypeAlias = tuple[int, int]
"""Where a text can be cut: its characters up to there, and the bytes of their packed token ids."""

START: Final = (0, 0)
# Texts with more are not cut: to find them would take too long.
_MOST_MARKS: Final = 2**14
_LAST: Final = 2**63 - 1
_TRIED_TOKENS = 12


class Boundary(NamedTuple):
    """A special token before which texts can be cut: its text, and its id."""

    text: str
    token: int

    def marks(self, text: str, tokens: bytes, known: Sequence[Mark] = ()) -> list[Mark]:
        """Where a text with these packed token ids can be cut, in order. `known`: the first of them, where some are.

        The last of those is looked for again, so that all that is new is behind it.
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
        """Those of a text's marks that another has, too, which begins with `common` characters alike."""
        return marks[: bisect_right(marks, (common - len(self.text), _LAST))]


def boundary_of(encoder: Encoder, conversation: str) -> Boundary | None:
    """The first special token that comes again in a conversation's text, if texts can be cut there."""
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
    """Whether another special token may begin before it, or where it does: of two the first or the longer is found."""
    return any(
        boundary in other or any(other.endswith(boundary[:size]) for size in range(1, len(boundary)))
        for other in special
        if other != boundary
    )


def _passes(encoder: Encoder, boundary: Boundary) -> bool:
    """Whether awkward texts have the same tokens in two parts as in one, and the boundary's id where its text is."""
    rests = [f"{boundary.text}{text}" for text in AWKWARD]
    starts = [*AWKWARD, *encoder.special[:_TRIED_TOKENS], *rests, boundary.text[:1], boundary.text[:-1]]
    for number, start in enumerate(starts):
        rest = rests[number * 7 % len(rests)]
        first, second, whole = encoder.encode([start, rest, start + rest])
        if first + second != whole or len(boundary.marks(start + rest, whole)) != (start + rest).count(boundary.text):
            return False
    return True
