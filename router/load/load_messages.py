"""What routers send each other: what is in flight as it is now, never differences.

Each sends what changed, and now and then all that it has in flight. What is not repeated is forgotten, so that a lost
message is mended by the next.

A prompt is shared as the hashes of its prefixes, one for every `SHARED_TOKENS`.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Annotated, TypeAlias

import msgspec

from router.cache_state.in_flight_prefixes import CHUNK_TOKENS

# A prompt of 30 000 tokens takes 1.9 kB then. What is shared below that is little to compute.
SHARED_STRIDE = 8
SHARED_TOKENS = SHARED_STRIDE * CHUNK_TOKENS
# Prefixes of one prompt that are shared: those of 131 072 tokens.
MAX_SHARED = 1024
# A message of ours is a tenth of it.
_MOST_BYTES = 4 * 1024 * 1024
# What is above it is no count of anything.
_MOST = 1 << 50
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
_Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=65536)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]


class Kind(IntEnum):
    """NEWS: what is in flight; HELLO: send me yours; GONE: nothing is in flight any more."""

    NEWS = 0
    HELLO = 1
    GONE = 2


class RankLoad(msgspec.Struct, array_like=True, frozen=True):
    """What a router has in flight on a DP rank: requests, tokens as in `load`, and seconds of prefill."""

    worker: _Name
    dp_rank: _Rank
    requests: _Count
    pending: _Count
    context: _Count
    waiting: _Count
    streamed: _Count
    backlog: _Seconds


class SentPrompt(msgspec.Struct, array_like=True, frozen=True):
    """A prompt was sent to a target. `prefixes`: 8 bytes each. Its end is reported with `number`."""

    number: _Count
    worker: _Name
    dp_rank: _Rank
    model: _Name
    prefixes: bytes


class Message(msgspec.Struct, array_like=True, frozen=True):
    """What one router sends.

    `number` counts its messages. `ended`: prompts sent earlier. `oldest`: all prompts before it have ended.
    `made`: responses, each with its worker's URL. `spent`: by tenants since the last message, requests and tokens.
    `failed`: those of `ended` that their workers did not compute.
    """

    router: _Name
    number: _Count
    kind: Kind
    loads: list[RankLoad] = []
    sent: list[SentPrompt] = []
    ended: list[int] = []
    oldest: int = 0
    made: list[tuple[_Name, _Name]] = []
    spent: list[tuple[_Name, _Count, _Count]] = []
    failed: list[int] = []


encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message).decode


def decode(data: bytes) -> Message:
    """A message of another router. Raises ValueError for anything else, and for what no router has in flight."""
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has {len(data)} bytes")
    try:
        return _decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error


def shared_hashes(hashes: array[int]) -> array[int]:
    """Of a prompt's prefix hashes, a chunk each, those that are shared."""
    return hashes[SHARED_STRIDE - 1 : MAX_SHARED * SHARED_STRIDE : SHARED_STRIDE]
