"""Tagged arrays with fields by position, `["BlockStored", …]`: vLLM up to 0.23, SGLang up to 0.5.19."""

from __future__ import annotations

from typing import Any

import msgspec

from kvevents.dialects.dialect import Dialect, RawEvent, is_map, only_full_attention, salt_in_first_keys
from kvevents.events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event

_Fields = dict[type[Event], tuple[str, ...]]

_VLLM: _Fields = {
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
}
_SGLANG: _Fields = {
    BlockStored: ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    BlockRemoved: ("block_hashes", "medium"),
    AllBlocksCleared: (),
}


class _SglangExtras(msgspec.Struct):
    cache_salt: str | None = None


class _Stored(msgspec.Struct, array_like=True, tag="BlockStored", gc=False):
    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    token_ids: list[int] | None = []
    block_size: int | None = 0
    lora_id: int | None = None
    medium: str | None = None
    # vLLM's lora_name. SGLang 0.5.18 and 0.5.19 have a map with the cache salt at this position.
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
            self.token_ids or [],
            self.block_size or 0,
            self.lora_id,
            self.medium,
            lora_name,
            self.extra_keys,
            self.group_idx,
            self.kv_cache_spec_kind,
            self.kv_cache_spec_sliding_window,
            cache_salt,
        )


class _Removed(msgspec.Struct, array_like=True, tag="BlockRemoved", gc=False):
    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None

    def event(self) -> BlockRemoved:
        return BlockRemoved(self.block_hashes, self.medium, self.group_idx)


class _Cleared(msgspec.Struct, array_like=True, tag="AllBlocksCleared", gc=False):
    medium: str | None = None

    def event(self) -> AllBlocksCleared:
        return AllBlocksCleared(self.medium)


_decode = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared).decode


def read(raw: RawEvent) -> Event | None:
    """Decode a tagged array of either engine; None for other data."""
    if is_map(raw):
        return None
    listed: _Stored | _Removed | _Cleared = _decode(raw)
    return listed.event()


def _write_vllm(event: Event, _: int | None) -> list[Any]:
    return [type(event).__name__, *(getattr(event, name) for name in _VLLM[type(event)])]


def _write_sglang(event: Event, _: int | None) -> list[Any]:
    fields = [type(event).__name__, *(getattr(event, name) for name in _SGLANG[type(event)])]
    if isinstance(event, BlockStored) and event.cache_salt is not None:
        fields.append({"cache_salt": event.cache_salt})
    return fields


def _without_adapters(event: BlockStored) -> BlockStored | None:
    return only_full_attention(event, adapter=event.lora_name is not None)


VLLM = Dialect(read, _write_vllm, salt_in_first_keys)
SGLANG = Dialect(read, _write_sglang, _without_adapters, frozenset({int}))
