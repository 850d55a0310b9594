"""Tagged maps, `{"type": "BlockStored", …}`: vLLM from 0.24, SGLang from 0.5.20."""

from __future__ import annotations

from typing import Any

import msgspec

from kvevents.dialects.dialect import Dialect, RawEvent, is_map, salt_in_first_keys
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, Event

# Fields that the engines' decoders require in a map, even if they are null.
_REQUIRED: dict[type[Event], tuple[str, ...]] = {
    BlockStored: ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    BlockRemoved: ("block_hashes", "medium"),
    AllBlocksCleared: (),
}

_decode = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared).decode
_decode_fields = msgspec.msgpack.Decoder(dict[str, Any]).decode


class _Tags(msgspec.Struct):
    """Tags of a map. `event_type` is the tag of RFC 1527, with or without `type`."""

    type: Any = None
    event_type: Any = None


_decode_tags = msgspec.msgpack.Decoder(_Tags).decode
_NAMES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def read(raw: RawEvent) -> Event | None:
    """Decode a tagged map; None for other data. A null field equals a missing one."""
    if not is_map(raw):
        return None
    try:
        event: Event = _decode(raw)
        return event
    except msgspec.ValidationError:
        tags = _decode_tags(raw)
        if tags.event_type is not None or not isinstance(tags.type, str) or tags.type not in _NAMES:
            return None
    fields = {name: value for name, value in _decode_fields(raw).items() if value is not None}
    return msgspec.convert(fields, BlockStored | BlockRemoved | AllBlocksCleared)


def _write(event: Event, required: tuple[str, ...]) -> dict[str, Any]:
    fields: dict[str, Any] = {"type": type(event).__name__}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if value is not None or name in required:
            fields[name] = value
    return fields


def _write_vllm(event: Event, _: int | None) -> dict[str, Any]:
    required = _REQUIRED[type(event)]
    return _write(event, (*required, "lora_name") if isinstance(event, BlockStored) else required)


def _write_sglang(event: Event, _: int | None) -> dict[str, Any]:
    return _write(event, _REQUIRED[type(event)])


VLLM = Dialect(read, _write_vllm, salt_in_first_keys)
SGLANG = Dialect(read, _write_sglang, hash_types=frozenset({int}))
