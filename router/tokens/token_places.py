"""Where a token is in a prompt: by the index's native core where it was built, else by its twin here."""

from __future__ import annotations

from collections.abc import Callable

from indexer.cores import native_core
from indexer.hashing import TOKEN_BYTES, pack_tokens


def token_places_by_search(tokens: bytes, token: int, start: int) -> list[int]:
    """Where a token is in a packed prompt, in bytes, from byte `start` on, with which a token begins."""
    wanted, places = pack_tokens([token]), []
    place = tokens.find(wanted, start)
    while place >= 0:
        if place % TOKEN_BYTES == 0:  # else the end of one and the beginning of the next
            places.append(place)
        place = tokens.find(wanted, place + 1)
    return places


_native = native_core()
token_places: Callable[[bytes, int, int], list[int]] = (
    token_places_by_search if _native is None else _native.token_places
)
