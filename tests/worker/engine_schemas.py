"""The event types of vLLM and SGLang that the decoders of real releases expect, release by release.

Fields, their order and their necessity are those of the releases. Each entry of `RELEASES` has the batch type that a
subscriber of the release decodes, and the wire form that its engine sends.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvevents import WireForm

Hash = int | bytes


def _batch(rank_field: str | None, *events: type[Any]) -> type[Any]:
    """`[ts, events, rank]`; the first releases had no rank."""
    kind: Any = events[0] | events[1] | events[2]
    rank = [(rank_field, int | None, None)] if rank_field else []
    return msgspec.defstruct(
        "KVEventBatch", [("ts", float), ("events", list[kind]), *rank], array_like=True, omit_defaults=True
    )


def _event(name: str, fields: list[Any], array_like: bool, **options: Any) -> type[Any]:
    return msgspec.defstruct(name, fields, array_like=array_like, omit_defaults=True, tag=name, **options)


def _release(rank_field: str | None, hashes: Any, array_like: bool, stored: list[Any], removed: list[Any]) -> type[Any]:
    first = [
        ("block_hashes", list[hashes]),
        ("parent_block_hash", hashes | None),
        ("token_ids", list[int]),
        ("block_size", int),
        ("lora_id", int | None),
    ]
    return _batch(
        rank_field,
        _event("BlockStored", [*first, *stored], array_like),
        _event("BlockRemoved", [("block_hashes", list[hashes]), *removed], array_like),
        _event("AllBlocksCleared", [], array_like),
    )


_MEDIUM = ("medium", str | None)
_KEYS = ("extra_keys", list[tuple[Any, ...] | None] | None, None)
_GROUP = ("group_idx", int | None, None)
_SPEC = [("kv_cache_spec_kind", str | None, None), ("kv_cache_spec_sliding_window", int | None, None)]
_OWNER = [("locality", str | None, None), ("ownership", str | None, None)]
_NAMED = [_MEDIUM, ("lora_name", str | None)]
_SESSION = ("session_id", str | None, None)
_OPTIONAL_MEDIUM = ("medium", str | None, None)
_SALT = ("cache_salt", str | None, None)

_ARRAYS, _MAPS = True, False

VLLM = {
    "0.9": _release("data_parallel_rank", int, _ARRAYS, [], []),
    "0.10.2": _release("data_parallel_rank", Hash, _ARRAYS, [_MEDIUM], [_MEDIUM]),
    "0.14": _release("data_parallel_rank", Hash, _ARRAYS, _NAMED, [_MEDIUM]),
    "0.17": _release("data_parallel_rank", Hash, _ARRAYS, [*_NAMED, _KEYS], [_MEDIUM]),
    "0.20": _release("data_parallel_rank", Hash, _ARRAYS, [*_NAMED, _KEYS, _GROUP], [_MEDIUM, _GROUP]),
    "0.22": _release("data_parallel_rank", Hash, _ARRAYS, [*_NAMED, _KEYS, _GROUP, *_SPEC], [_MEDIUM, _GROUP]),
    "0.24": _release("data_parallel_rank", Hash, _MAPS, [*_NAMED, _KEYS, _GROUP, *_SPEC], [_MEDIUM, _GROUP]),
    "0.32": _release(
        "data_parallel_rank",
        Hash,
        _MAPS,
        [*_NAMED, _KEYS, _GROUP, *_SPEC, *_OWNER, _SESSION],
        [_MEDIUM, _GROUP, *_OWNER],
    ),
}
SGLANG = {
    "0.4.6": _release(None, int, _ARRAYS, [], []),
    "0.4.7": _release("attn_dp_rank", int, _ARRAYS, [], []),
    "0.5.9": _release("attn_dp_rank", int, _ARRAYS, [_OPTIONAL_MEDIUM], [_OPTIONAL_MEDIUM]),
    "0.5.18": _release(
        "attn_dp_rank",
        int,
        _ARRAYS,
        [_OPTIONAL_MEDIUM, ("metadata", dict[str, str] | None, None)],
        [_OPTIONAL_MEDIUM],
    ),
    "0.5.20": _release("attn_dp_rank", int, _MAPS, [_OPTIONAL_MEDIUM, _SALT, _SESSION], [_OPTIONAL_MEDIUM]),
    "0.5.23": _release(
        "attn_dp_rank",
        int,
        _MAPS,
        [_OPTIONAL_MEDIUM, _SALT, _SESSION, ("lora_name", str | None, None)],
        [_OPTIONAL_MEDIUM],
    ),
}


def _sends(release: str, maps_since: tuple[int, ...], maps: WireForm, arrays: WireForm) -> WireForm:
    return maps if tuple(map(int, release.split("."))) >= maps_since else arrays


# (engine, release) → its wire form and its batch type.
RELEASES: dict[tuple[str, str], tuple[WireForm, type[Any]]] = {
    **{
        ("vllm", release): (_sends(release, (0, 24), WireForm.VLLM_MAPS, WireForm.VLLM_ARRAYS), batch)
        for release, batch in VLLM.items()
    },
    **{
        ("sglang", release): (_sends(release, (0, 5, 20), WireForm.SGLANG_MAPS, WireForm.SGLANG_ARRAYS), batch)
        for release, batch in SGLANG.items()
    },
}


class StandardEvent(msgspec.Struct):
    """An event of Mooncake's RFC 1527, as its readers know it."""

    event_type: str
    medium: str | None
    dp_rank: int | None
    seq_hashes: list[Hash] = []
    base_block_idx: int | None = None
    parent_hash: Hash | None = None
    token_ids: list[int] | None = None
    block_size: int | None = None
    lora_name: str | None = None
    additional_salt: str | None = None


class StandardBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[StandardEvent]
    dp_rank: int | None = None
