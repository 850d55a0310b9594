"""What routers send each other: what is in flight as it is now, never differences.

Each sends what changed, and now and then all that it has in flight. What is not repeated is forgotten, so that a lost
message is mended by the next.

A prompt is shared as the hashes of its prefixes, one for every `SHARED_TOKENS`.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

import msgspec

from router.holdings.speculation import CHUNK_TOKENS

# A prompt of 30 000 tokens takes 1.9 kB then. What is shared below that is little to compute.
SHARED_STRIDE = 8
SHARED_TOKENS = SHARED_STRIDE * CHUNK_TOKENS
# Prefixes of one prompt that are shared: those of 131 072 tokens.
MAX_SHARED = 1024


class Kind(IntEnum):
    """NEWS: what is in flight; HELLO: send me yours; GONE: nothing is in flight any more."""

    NEWS = 0
    HELLO = 1
    GONE = 2


class RankLoad(msgspec.Struct, array_like=True, frozen=True):
    """What a router has in flight on a DP rank: requests, tokens as in `load`, and seconds of prefill."""

    worker: str
    dp_rank: int
    requests: int
    pending: int
    context: int
    waiting: int
    streamed: int
    backlog: float


class SentPrompt(msgspec.Struct, array_like=True, frozen=True):
    """A prompt was sent to a target. `prefixes`: 8 bytes each. Its end is reported with `number`."""

    number: int
    worker: str
    dp_rank: int
    model: str
    prefixes: bytes


class Message(msgspec.Struct, array_like=True, frozen=True):
    """What one router sends.

    `number` counts its messages. `ended`: prompts sent earlier. `oldest`: all prompts before it have ended.
    `made`: responses, each with its worker's URL. `spent`: by tenants since the last message, requests and tokens.
    `failed`: those of `ended` that their workers did not compute.
    """

    router: str
    number: int
    kind: Kind
    loads: list[RankLoad] = []
    sent: list[SentPrompt] = []
    ended: list[int] = []
    oldest: int = 0
    made: list[tuple[str, str]] = []
    spent: list[tuple[str, int, int]] = []
    failed: list[int] = []


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Message).decode


def shared_hashes(hashes: array[int]) -> array[int]:
    """Of a prompt's prefix hashes, a chunk each, those that are shared."""
    return hashes[SHARED_STRIDE - 1 : MAX_SHARED * SHARED_STRIDE : SHARED_STRIDE]
