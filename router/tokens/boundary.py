"""Where the text of a conversation can be cut, so that its start and its rest have the token ids of the whole.

That is before a special token, as templates put one between messages. A conversation's next turn is tokenized from the
last such place that it has in common with a text before: what comes earlier has the token ids that it had there.

Tokenizers find special tokens before anything else, but have more rules than one can think of. A trial decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from indexer.hashing import TOKEN_BYTES
from router.tokens.prompt_cache import Begun
from router.tokens.text_encoder import Encoder
from router.tokens.tokenizer_check import AWKWARD

NO_CUT: Final = (0, b"")
# Boundaries from the cut to the end of the known text: those of one message or two.
_MOST_LATER = 32
_TRIED_TOKENS = 12


class Boundary(NamedTuple):
    """A special token before which texts can be cut: its text, and its packed id."""

    text: str
    token: bytes

    def cut(self, text: str, begun: Begun) -> tuple[int, bytes]:
        """How many of the first characters of a text need not be tokenized, and their packed token ids."""
        known, cut = begun.known, text.rfind(self.text, 0, begun.common)
        if known is None or not known.plain or cut < 0:
            return NO_CUT
        later = known.text.count(self.text, cut)
        if later > _MOST_LATER:
            return NO_CUT
        tokens = known.prompt.tokens
        place = len(tokens)
        for _ in range(later):
            place = self._last(tokens, place)
            if place < 0:
                return NO_CUT
        return cut, tokens[:place]

    def _last(self, tokens: bytes, end: int) -> int:
        """Where its id is for the last time before `end`; below 0 where it is not."""
        place = tokens.rfind(self.token, 0, end)
        while place > 0 and place % TOKEN_BYTES:  # the end of an id and the beginning of the next
            place = tokens.rfind(self.token, 0, place + TOKEN_BYTES - 1)
        return place


def boundary_of(encoder: Encoder, conversation: str) -> Boundary | None:
    """The first special token that comes again in a conversation's text, if texts can be cut there."""
    places = {text: conversation.find(text) for text in encoder.exact if conversation.count(text) > 1}
    for text in sorted(places, key=places.__getitem__):
        (token,) = encoder.encode([text])
        boundary = Boundary(text, token)
        if len(token) == TOKEN_BYTES and not _overlapped(text, encoder.special) and _passes(encoder, boundary):
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
        ids = [whole[place : place + TOKEN_BYTES] for place in range(0, len(whole), TOKEN_BYTES)]
        if first + second != whole or ids.count(boundary.token) != (start + rest).count(boundary.text):
            return False
    return True
