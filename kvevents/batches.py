"""Encoding and decoding of event batches, in the dialects of `kvevents.dialects`.

A batch is the msgpack array `[ts, events, dp_rank]`. Each event may have another dialect. Missing, null and unknown
fields are accepted. An unreadable event is listed in `EventBatch.rejected`, and the other events are decoded.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import msgspec

from kvevents.dialects import DIALECTS, WireForm
from kvevents.dialects.dialect import RawEvent, is_map
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, RejectedEvent


class MalformedBatchError(ValueError):
    """A payload that is not an event batch."""


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    dp_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    dp_rank: int | None = None


HIGHEST_RANK = 65_535
# msgspec raises RecursionError for data that is nested too deep.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_decode_maps = msgspec.msgpack.Decoder(_MapBatch).decode
_decode_raw = msgspec.msgpack.Decoder(_RawBatch).decode
_READERS = tuple(dict.fromkeys(dialect.read for dialect in DIALECTS.values()))


class _Outline(msgspec.Struct, array_like=True):
    ts: float
    events: msgspec.Raw


# Latest valid time of a batch in unix seconds: the year 5138. A later, negative or NaN time is invalid.
LATEST_TIME = 1e11
_FLOAT = Struct(">d")
_LONG_ARRAYS = (0xDC, 0xDD)  # first bytes of long msgpack arrays; short ones begin with 0x9
_decode_outline = msgspec.msgpack.Decoder(_Outline).decode


def batch_time(payload: bytes) -> float | None:
    """Return the engine's time of a batch in unix seconds; None if the payload is no batch or has no valid time."""
    if len(payload) > 10 and payload[0] & 0xF0 == 0x90 and payload[1] == 0xCB:  # an array that begins with a float
        (ts,) = _FLOAT.unpack_from(payload, 2)
        events = payload[10]
    else:
        try:
            outline = _decode_outline(payload)
        except _UNREADABLE:
            return None
        ts, events = outline.ts, memoryview(outline.events)[0]
    is_array = events & 0xF0 == 0x90 or events in _LONG_ARRAYS
    return ts if is_array and 0 <= ts <= LATEST_TIME else None


class _RankOutline(msgspec.Struct, array_like=True):
    ts: float
    events: msgspec.Raw
    dp_rank: int | None = None


_decode_ranks = msgspec.msgpack.Decoder(_RankOutline).decode


def batch_rank(payload: bytes) -> int | None:
    """Return the DP rank of a batch, 0 if it names none; None if the payload is no batch or has an invalid rank."""
    try:
        rank = _decode_ranks(payload).dp_rank or 0
    except _UNREADABLE:
        return None
    return rank if 0 <= rank <= HIGHEST_RANK else None


def decode_batch(payload: bytes) -> EventBatch:
    """Decode a frame's payload. Unreadable events are set apart. Raises MalformedBatchError if it is no batch."""
    try:
        batch = _decode_maps(payload)
    except _UNREADABLE:
        return _decode_one_by_one(payload)
    return EventBatch(batch.ts, batch.events, batch.dp_rank)


# Fewer bytes than any event takes. A batch with more events than fit would cost many times its size to reject.
_SHORTEST_EVENT = 16
_FEW_EVENTS = 1024


def _decode_one_by_one(payload: bytes) -> EventBatch:
    """Decode a batch with tagged arrays, or with an event that is no valid map of vLLM or SGLang."""
    try:
        batch = _decode_raw(payload)
    except _UNREADABLE as error:
        raise MalformedBatchError(f"not an event batch [ts, events, dp_rank]: {error}") from error
    if len(batch.events) > max(len(payload) // _SHORTEST_EVENT, _FEW_EVENTS):
        raise MalformedBatchError(f"{len(batch.events)} events in {len(payload)} bytes: too many to be valid")
    events: list[Event] = []
    rejected: list[RejectedEvent] = []
    for index, raw in enumerate(batch.events):
        event = decode_event(index, raw)
        if isinstance(event, RejectedEvent):
            rejected.append(event)
        else:
            events.append(event)
    return EventBatch(batch.ts, events, batch.dp_rank, rejected)


def decode_event(index: int, raw: RawEvent) -> Event | RejectedEvent:
    """Decode one event of a batch. Returns the reason if it is unreadable. `index` is its place in the batch."""
    try:
        return _decode_event(raw)
    except _UNREADABLE as error:
        return RejectedEvent(index, _reason(raw, str(error)))


def _decode_event(raw: RawEvent) -> Event:
    for read in _READERS:
        event = read(raw)
        if event is not None:
            return event
    raise msgspec.ValidationError("an event of no known dialect")


class _Pairs(msgspec.Struct):
    token_ids: list[tuple[int, int]]


class _ArrayPairs(msgspec.Struct, array_like=True):
    tag: str
    block_hashes: Any
    parent_block_hash: Any
    token_ids: list[tuple[int, int]]


_decode_map_pairs = msgspec.msgpack.Decoder(_Pairs).decode
_decode_array_pairs = msgspec.msgpack.Decoder(_ArrayPairs).decode


def _reason(raw: RawEvent, reason: str) -> str:
    """Return why an event is rejected. SGLang with EAGLE sends pairs of tokens, because its cache has pairs."""
    try:
        _decode_map_pairs(raw) if is_map(raw) else _decode_array_pairs(raw)
    except _UNREADABLE:
        return reason
    return "token_ids are pairs, as in EAGLE's cache: they identify no prefix of a prompt"


_encode = msgspec.msgpack.Encoder().encode


def encode_batch(batch: EventBatch, form: WireForm = WireForm.VLLM_MAPS) -> bytes:
    """Encode a batch as msgpack `[ts, events, dp_rank]` in the given dialect."""
    write = DIALECTS[form].write
    return _encode([batch.ts, [write(event, batch.dp_rank) for event in batch.events], batch.dp_rank])
