"""Mooncake's standard events (RFC 1527), in the form of Mooncake's publisher: maps with an `event_type`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvevents.dialects.dialect import Dialect, RawEvent, is_map, only_full_attention
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event, is_identified


class _Kind(msgspec.Struct):
    event_type: Any = None


class _StandardEvent(msgspec.Struct):
    """One event, whose unknown fields may be null. `backend_id`, the owner of the cache, is ignored."""

    event_type: Literal["stored", "removed", "cleared"]
    seq_hashes: list[EngineHash] | None = None
    parent_hash: EngineHash | None = None
    base_block_idx: int | None = None
    token_ids: list[int] | None = None
    block_size: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    additional_salt: str | None = None


_decode_kind = msgspec.msgpack.Decoder(_Kind).decode
_decode = msgspec.msgpack.Decoder(_StandardEvent).decode


def read(raw: RawEvent) -> Event | None:
    """Decode an event map of RFC 1527; None for other data."""
    if not is_map(raw) or _decode_kind(raw).event_type is None:
        return None
    event = _decode(raw)
    hashes = event.seq_hashes or []
    medium = event.medium.upper() if event.medium else None  # the standard has lower case, also for an engine's own
    if event.event_type == "removed":
        return BlockRemoved(hashes, medium)
    if event.event_type == "cleared":
        return AllBlocksCleared(medium)
    token_ids = event.token_ids or []
    if event.base_block_idx and event.parent_hash is None and token_ids:
        raise msgspec.ValidationError("base_block_idx is above 0 and there is no parent_hash: the prefix is unknown")
    return BlockStored(
        hashes,
        event.parent_hash,
        token_ids,
        event.block_size or (len(token_ids) // len(hashes) if hashes else 0),
        medium=medium,
        lora_name=event.lora_name,
        extra_keys=[None] * len(hashes) if token_ids and not is_identified(medium) else None,  # it has all of them
        cache_salt=event.additional_salt,
    )


def _write(event: Event, dp_rank: int | None) -> dict[str, Any]:
    """Return the map of an event, without cache groups, extra keys and LoRA numbers, which the standard lacks."""
    medium = event.medium.lower() if event.medium else None
    if isinstance(event, AllBlocksCleared):
        return {"event_type": "cleared", "medium": medium, "dp_rank": dp_rank}
    if isinstance(event, BlockRemoved):
        return {"event_type": "removed", "seq_hashes": event.block_hashes, "medium": medium, "dp_rank": dp_rank}
    return {
        "event_type": "stored",
        "seq_hashes": event.block_hashes,
        "base_block_idx": 0 if event.parent_block_hash is None else None,
        "parent_hash": event.parent_block_hash,
        "token_ids": event.token_ids or None,
        "block_size": event.block_size,
        "lora_name": event.lora_name,
        "additional_salt": event.cache_salt,
        "medium": medium,
        "dp_rank": dp_rank,
    }


def _adapters_by_name(event: BlockStored) -> BlockStored | None:
    return only_full_attention(event, adapter=event.lora_id is not None and event.lora_name is None)


STANDARD = Dialect(read, _write, _adapters_by_name)
