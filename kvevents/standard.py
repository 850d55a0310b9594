"""Mooncake's standard event maps (RFC 1527), as their own publisher sends them: maps with an `event_type`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event


class _StandardEvent(msgspec.Struct):
    """`backend_id` says who owns the cache, not who to route to, and is left out."""

    event_type: Literal["stored", "removed", "cleared"]
    seq_hashes: list[EngineHash] = []
    parent_hash: EngineHash | None = None
    base_block_idx: int | None = None
    token_ids: list[int] | None = None
    block_size: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    additional_salt: str | None = None


_decode = msgspec.msgpack.Decoder(_StandardEvent).decode


def decode_standard_event(raw: msgspec.Raw | bytes) -> Event:
    """Decode one event map. Raises msgspec.DecodeError for what is none."""
    event = _decode(raw)
    medium = event.medium.upper() if event.medium else None
    if event.event_type == "removed":
        return BlockRemoved(event.seq_hashes, medium)
    if event.event_type == "cleared":
        return AllBlocksCleared(medium)
    if event.base_block_idx and event.parent_hash is None and event.token_ids:
        raise msgspec.ValidationError("base_block_idx is above 0 and there is no parent_hash: the prefix is unknown")
    return BlockStored(
        event.seq_hashes,
        event.parent_hash,
        event.token_ids or [],
        event.block_size or 0,
        medium=medium,
        lora_name=event.lora_name,
        cache_salt=event.additional_salt,
    )


def standard_event(event: Event, dp_rank: int | None) -> dict[str, Any]:
    """An event as a map. What the standard has no place for (cache groups, extra keys, LoRA numbers) is left out."""
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
