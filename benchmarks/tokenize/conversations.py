"""Conversations that grow turn by turn, out of the texts that come with Python."""

from __future__ import annotations

from functools import cache
from pydoc_data.topics import topics
from random import Random
from typing import Any

import msgspec

# Characters of what a user and an assistant say, at least and at most.
_USER = (40, 1200)
_ASSISTANT = (200, 2800)


def bodies(seed: int, characters: int) -> list[bytes]:
    """The bodies of a conversation's requests, each one turn longer than the last, up to so many characters."""
    random = Random(seed)
    messages: list[dict[str, Any]] = [{"role": "system", "content": _passage(random, (1500, 2500))}]
    found: list[bytes] = []
    length = 0
    while length < characters:
        messages.append({"role": "user", "content": _passage(random, _USER)})
        found.append(msgspec.json.encode({"model": "m", "messages": messages, "stream": True}))
        length = len(found[-1])
        messages.append({"role": "assistant", "content": _passage(random, _ASSISTANT)})
    return found


def _passage(random: Random, lengths: tuple[int, int]) -> str:
    """A part of Python's language reference, with a number of its own so that no other passage is the same."""
    length = random.randint(*lengths)
    start = random.randrange(len(_reference()) - length)
    return f"{random.randrange(10**9)}: {_reference()[start : start + length]}"


@cache
def _reference() -> str:
    return "\n".join(text for _, text in sorted(topics.items()))
