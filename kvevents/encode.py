"""Encode event batches in the forms that vLLM's, SGLang's and Mooncake's own publishers send.

Each form of `WireForm` can be read back by `decode_batch`, and by the engines' own decoders of that generation.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import msgspec

from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch
from kvevents.standard import standard_event


class WireForm(StrEnum):
    """How the events of a batch are laid out."""

    VLLM_MAPS = "vllm"
    VLLM_ARRAYS = "vllm-arrays"
    SGLANG_MAPS = "sglang"
    SGLANG_ARRAYS = "sglang-arrays"
    STANDARD = "rfc1527"


_encode = msgspec.msgpack.Encoder().encode

_ARRAY_FIELDS: dict[WireForm, dict[type[Event], tuple[str, ...]]] = {
    WireForm.VLLM_ARRAYS: {
        BlockStored: (
            "block_hashes",
            "parent_block_hash",
            "token_ids",
            "block_size",
            "lora_id",
            "medium",
            "lora_name",
            "extra_keys",
            "group_idx",
            "kv_cache_spec_kind",
            "kv_cache_spec_sliding_window",
        ),
        BlockRemoved: ("block_hashes", "medium", "group_idx"),
        AllBlocksCleared: (),
    },
    WireForm.SGLANG_ARRAYS: {
        BlockStored: ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
        BlockRemoved: ("block_hashes", "medium"),
        AllBlocksCleared: (),
    },
}
# The engines' decoders require these fields in a map, null or not.
_MAP_FIELDS: dict[type[Event], tuple[str, ...]] = {
    BlockStored: ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    BlockRemoved: ("block_hashes", "medium"),
    AllBlocksCleared: (),
}


def encode_batch(batch: EventBatch, form: WireForm = WireForm.VLLM_MAPS) -> bytes:
    """Encode a batch as msgpack `[ts, events, dp_rank]` in the given form."""
    if form is WireForm.STANDARD:
        events: list[Any] = [standard_event(event, batch.dp_rank) for event in batch.events]
    else:
        lay_out = _as_array if form in _ARRAY_FIELDS else _as_map
        events = [lay_out(event, form) for event in batch.events]
    return _encode([batch.ts, events, batch.dp_rank])


def _as_array(event: Event, form: WireForm) -> list[Any]:
    fields = [type(event).__name__, *(getattr(event, name) for name in _ARRAY_FIELDS[form][type(event)])]
    if form is WireForm.SGLANG_ARRAYS and isinstance(event, BlockStored) and event.cache_salt is not None:
        fields.append({"cache_salt": event.cache_salt})
    return fields


def _as_map(event: Event, form: WireForm) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(event).__name__}
    required = _MAP_FIELDS[type(event)]
    if form is WireForm.VLLM_MAPS and isinstance(event, BlockStored):
        required = (*required, "lora_name")
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if value is not None or name in required:
            fields[name] = value
    return fields
