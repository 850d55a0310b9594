"""Decode event batches as vLLM and SGLang send them.

A batch is the msgpack array `[ts, events, dp_rank]`. Each event is a tagged map (`{"type": "BlockStored", …}`, vLLM
from 0.24, SGLang from 0.5.20), a tagged array with fields by position (`["BlockStored", …]`, before), or one of
Mooncake's standard maps. Missing and unknown fields are tolerated. An event that cannot be read is set aside in
`EventBatch.rejected`; the others stay.
"""

from __future__ import annotations

from struct import Struct
from typing import Any

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event, EventBatch, RejectedEvent
from kvevents.standard import decode_standard_event


class MalformedBatchError(ValueError):
    """The payload of a stream frame is no event batch at all."""


class _MapBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    dp_rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    dp_rank: int | None = None


class _SglangExtras(msgspec.Struct):
    cache_salt: str | None = None


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    # vLLM's lora_name; SGLang 0.5.18 and 0.5.19 put a map with the cache salt in the same place.
    lora_name_or_salt: str | _SglangExtras | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None

    def event(self) -> BlockStored:
        named = self.lora_name_or_salt
        lora_name = None if isinstance(named, _SglangExtras) else named
        cache_salt = named.cache_salt if isinstance(named, _SglangExtras) else None
        return BlockStored(
            self.block_hashes,
            self.parent_block_hash,
            self.token_ids,
            self.block_size,
            self.lora_id,
            self.medium,
            lora_name,
            self.extra_keys,
            self.group_idx,
            self.kv_cache_spec_kind,
            self.kv_cache_spec_sliding_window,
            cache_salt,
        )


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None

    def event(self) -> BlockRemoved:
        return BlockRemoved(self.block_hashes, self.medium, self.group_idx)


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    medium: str | None = None

    def event(self) -> AllBlocksCleared:
        return AllBlocksCleared(self.medium)


# msgspec refuses what is nested too deep with a RecursionError.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

_decode_maps = msgspec.msgpack.Decoder(_MapBatch).decode
_decode_raw = msgspec.msgpack.Decoder(_RawBatch).decode
_decode_map = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared).decode
_decode_array = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray).decode


class _Time(msgspec.Struct, array_like=True):
    ts: float


_FLOAT = Struct(">d")
_decode_time = msgspec.msgpack.Decoder(_Time).decode


# Of a batch's time, in seconds: the year 5138. What is beyond, or no number at all, is no time.
_LATEST = 1e11


def batch_time(payload: bytes) -> float | None:
    """The engine's time of a batch (unix seconds); None when the payload is no event batch, or has no time in it."""
    if len(payload) > 9 and payload[0] & 0xF0 == 0x90 and payload[1] == 0xCB:  # an array that begins with a float
        (ts,) = _FLOAT.unpack_from(payload, 2)
        return ts if -_LATEST < ts < _LATEST else None
    try:
        ts = _decode_time(payload).ts
    except _UNREADABLE:
        return None
    return ts if -_LATEST < ts < _LATEST else None


def decode_batch(payload: bytes) -> EventBatch:
    """Decode the payload of one stream frame.

    Raises MalformedBatchError when the payload is not an event batch; a single bad event never raises.
    """
    try:
        batch = _decode_maps(payload)
    except _UNREADABLE:
        return _decode_one_by_one(payload)
    return EventBatch(batch.ts, batch.events, batch.dp_rank)


# Bytes, and a few less than it takes. A batch of more events than that would cost many times what it is.
_SHORTEST_EVENT = 16
_FEW_EVENTS = 1024


def _decode_one_by_one(payload: bytes) -> EventBatch:
    """The path for tagged arrays, and for batches with an event that does not fit."""
    try:
        batch = _decode_raw(payload)
    except _UNREADABLE as error:
        raise MalformedBatchError(f"not an event batch [ts, events, dp_rank]: {error}") from error
    if len(batch.events) > max(len(payload) // _SHORTEST_EVENT, _FEW_EVENTS):
        raise MalformedBatchError(f"{len(batch.events)} events in {len(payload)} bytes: most can be none")
    events: list[Event] = []
    rejected: list[RejectedEvent] = []
    for index, raw in enumerate(batch.events):
        event = decode_event(index, raw)
        if isinstance(event, RejectedEvent):
            rejected.append(event)
        else:
            events.append(event)
    return EventBatch(batch.ts, events, batch.dp_rank, rejected)


def decode_event(index: int, raw: msgspec.Raw | bytes) -> Event | RejectedEvent:
    """One event of a batch, by its number there; or why it cannot be read."""
    try:
        return _decode_event(raw)
    except _UNREADABLE as error:
        return RejectedEvent(index, _reason(raw, str(error)))


def _decode_event(raw: msgspec.Raw | bytes) -> Event:
    if not _is_map(raw):
        listed: _StoredArray | _RemovedArray | _ClearedArray = _decode_array(raw)
        return listed.event()
    try:
        event: Event = _decode_map(raw)
        return event
    except msgspec.ValidationError:
        if not _has_event_type(raw):
            raise
    return decode_standard_event(raw)


class _EventType(msgspec.Struct):
    event_type: Any = None
    type: Any = None


class _Pairs(msgspec.Struct):
    token_ids: list[tuple[int, int]]


class _ArrayPairs(msgspec.Struct, array_like=True):
    tag: str
    block_hashes: Any
    parent_block_hash: Any
    token_ids: list[tuple[int, int]]


_decode_type = msgspec.msgpack.Decoder(_EventType).decode
_decode_map_pairs = msgspec.msgpack.Decoder(_Pairs).decode
_decode_array_pairs = msgspec.msgpack.Decoder(_ArrayPairs).decode


def _is_map(raw: msgspec.Raw | bytes) -> bool:
    first = memoryview(raw)[0]
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def _has_event_type(raw: msgspec.Raw | bytes) -> bool:
    found = _decode_type(raw)
    return found.event_type is not None and found.type is None


def _reason(raw: msgspec.Raw | bytes, reason: str) -> str:
    """Why an event is set aside. SGLang with EAGLE sends pairs of tokens, for a cache that keeps pairs."""
    try:
        _decode_map_pairs(raw) if _is_map(raw) else _decode_array_pairs(raw)
    except _UNREADABLE:
        return reason
    return "token_ids are pairs, as EAGLE's cache keeps them: they name no prefix of a prompt"
