"""The messages between routers: the load that each has in flight, as present values, never as differences.

Each router sends its changes at once, and everything that it has in flight at intervals. What is not repeated expires,
so the next message repairs a lost one.

A prompt is shared as hashes of its prefixes, one for every `SHARED_TOKENS` tokens.
"""

from __future__ import annotations

from array import array
from enum import IntEnum
from typing import Annotated, TypeAlias

import msgspec

from kvevents.decoding import msgpack_reader
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS

# One in this many chunk hashes is sent: 1.9 kB for a prompt of 30 000 tokens. Shorter prefixes are cheap to compute.
SHARED_STRIDE = 8
SHARED_TOKENS = SHARED_STRIDE * CHUNK_TOKENS
# The most prefixes of one prompt that are sent: those of 131 072 tokens.
MAX_SHARED = 1024
# The largest message that is accepted. This router's own are at most a tenth of it.
_MOST_BYTES = 4 * 1024 * 1024
# The highest count that is accepted.
_MOST = 1 << 50
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_MOST)]
_Rank: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=65536)]
_Nanoseconds: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=4096)]


class Kind(IntEnum):
    """The kind of a message.

    - `NEWS`: changes of what the sender has in flight.
    - `HELLO`: the same, and a request to send everything.
    - `GONE`: the sender stops and has nothing in flight.
    """

    NEWS = 0
    HELLO = 1
    GONE = 2


class RankLoad(msgspec.Struct, array_like=True, frozen=True):
    """The load of one router on a DP rank: the counts of `TargetLoad`, and the backlog in seconds.

    - `live`: the tokens that its live sessions need there.
    - `memory`: the tokens of KV memory that its requests will need at once; None from routers that do not know it.
    - `prefill`: the predicted milliseconds of its prefills without a first byte.
    """

    worker: _Name
    dp_rank: _Rank
    requests: _Count
    pending: _Count
    context: _Count
    waiting: _Count
    streamed: _Count
    backlog: _Seconds
    live: _Count = 0
    memory: _Count | None = None
    prefill: _Count = 0


class SentPrompt(msgspec.Struct, array_like=True, frozen=True):
    """A prompt of `tokens` tokens that was sent to a target.

    - `number`: reports its end.
    - `prefixes`: the hashes of its prefixes, of 8 bytes each.
    - `session`: the number of its session; 0 if it has none.
    """

    number: _Count
    worker: _Name
    dp_rank: _Rank
    model: _Name
    prefixes: bytes
    session: _Count = 0
    tokens: _Count = 0


class EngineChange(msgspec.Struct, array_like=True, frozen=True):
    """A worker's URL and the fields of its `EngineState`."""

    worker: _Name
    at: _Nanoseconds
    paused: bool
    released: list[_Name]
    lost_at: _Nanoseconds


class Message(msgspec.Struct, array_like=True, frozen=True):
    """The message of one router.

    - `ended`: the numbers of prompts that ended.
    - `oldest`: the number of its oldest prompt in flight. All prompts before it have ended.
    - `made`: the ids of stored responses, each with the URL of its worker.
    - `spent`: the tenants that used something since the last message, each with its requests and tokens.
    - `failed`: the prompts in `ended` that their workers did not compute.
    - `engines`: what commands did to workers, by this router or by others.
    - `finished`: the names of sessions that their callers ended.
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
    engines: list[EngineChange] = []
    finished: list[_Name] = []


encode = msgspec.msgpack.Encoder().encode
_decode = msgpack_reader(Message)


def decode(data: bytes) -> Message:
    """Return the message in `data`. Raises ValueError if it is invalid, or has counts that no router can have."""
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has {len(data)} bytes")
    try:
        return _decode(data)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error


def shared_hashes(hashes: array[int]) -> array[int]:
    """Return those of a prompt's chunk hashes that are sent to other routers."""
    return hashes[SHARED_STRIDE - 1 : MAX_SHARED * SHARED_STRIDE : SHARED_STRIDE]
