"""Records of the KV-cache events that an engine sends, and the media and identity of their blocks.

Field names are vLLM's; SGLang's `cache_salt` is added. Sizes are in tokens. A block hash is the engine's own name
of a block: it is opaque, and valid only within one DP rank of one worker.

vLLM names the adapter in `lora_name` and again in every block's extra keys. It puts the salt into the extra keys of a
sequence's first block. SGLang sends the salt as `cache_salt`. `identity_of` reads both forms.

Of media, vLLM sends `GPU`, `CPU` and `STORAGE`; SGLang `GPU`, `CPU_PINNED`, `DISK` and `EXTERNAL`. Connectors to shared
pools send `cpu` and `disk` in lower case (Mooncake Store), `SHARED_STORAGE` (llm-d), `OBJ` and `OBJECT_STORE`.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec

EngineHash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Consecutive full blocks that an engine put into its cache, first block first.

    `token_ids` is flat: `block_size` ids for each hash. `parent_block_hash` names the block before the first one,
    None at the start of a sequence. `extra_keys` has one entry per block, which distinguishes equal tokens. `locality`
    is `LOCAL` or `REMOTE` if the operator declared where a storage medium is.
    """

    block_hashes: list[EngineHash]
    parent_block_hash: EngineHash | None = None
    token_ids: list[int] = []
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    locality: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, gc=False):
    """Blocks that left one medium of an engine's cache (one physical copy of each)."""

    block_hashes: list[EngineHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", omit_defaults=True, gc=False):
    """The whole cache of a DP rank, or of one medium of it, is empty now."""

    medium: str | None = None


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class RejectedEvent(msgspec.Struct, frozen=True):
    """An unreadable or invalid event: its place in the batch, and the reason."""

    index: int
    reason: str


class EventBatch(msgspec.Struct):
    """Changes that one engine step made in one DP rank's cache, in order. `ts`: the engine's clock (unix seconds)."""

    ts: float
    events: list[Event]
    dp_rank: int | None = None
    rejected: list[RejectedEvent] = []


_encode = msgspec.msgpack.Encoder().encode


class BlockIdentity(NamedTuple):
    """A sequence's adapter and salt, known only where it starts, and a key per block with media or other keys."""

    adapter: str | None
    cache_salt: str | None
    keys: list[bytes | None] | None


def identity_of(event: BlockStored, adapters: Collection[str] = ()) -> BlockIdentity:
    """Return the identity of an event's blocks. Raises ValueError if `extra_keys` does not have one entry per block.

    An event with a parent may name its adapter among the extra keys only, so the known `adapters` are needed.
    """
    extra = event.extra_keys
    adapter = event.lora_name
    if not extra or not any(extra):
        if adapter is None and event.lora_id is not None:
            adapter = f"lora_id:{event.lora_id}"
        return BlockIdentity(adapter, event.cache_salt, None)
    if len(extra) != len(event.block_hashes):
        raise ValueError(f"extra_keys has {len(extra)} entries for {len(event.block_hashes)} blocks")
    rest = [list(keys or ()) for keys in extra]
    if adapter is None:
        adapter = _adapter_in_keys(event, rest, adapters)
    if adapter is not None:
        for keys in rest:
            if adapter in keys:
                keys.remove(adapter)
    salt = event.cache_salt
    if salt is None and event.parent_block_hash is None:
        salt = next((key for key in reversed(rest[0]) if isinstance(key, str)), None)
        if salt is not None:
            rest[0].remove(salt)
    return BlockIdentity(adapter, salt, [encode_keys(keys) for keys in rest] if any(rest) else None)


def has_identity(event: BlockStored) -> bool:
    """Return whether an event has its blocks' whole identity. Otherwise salted blocks look like unsalted ones."""
    return event.extra_keys is not None or event.cache_salt is not None or is_identified(event.medium)


def encode_keys(keys: list[Any]) -> bytes | None:
    """Return the canonical bytes of a block's remaining keys; None without keys."""
    return _encode(keys) if keys else None


def _adapter_in_keys(event: BlockStored, keys_by_block: list[list[Any]], adapters: Collection[str]) -> str | None:
    """Return the adapter's name if it is only among the extra keys, or a name made of its id; None without adapter.

    The name is the first key of every block. The first key may also be a salt, in a sequence that starts with a single
    block, or an image, in later blocks. Then only an adapter id or a known name shows that the key is an adapter.
    """
    first = [keys[0] if keys and isinstance(keys[0], str) else None for keys in keys_by_block]
    name = first[0]
    if name is not None and first.count(name) == len(first):
        starts = event.parent_block_hash is None
        if event.lora_id is not None or name in adapters or (starts and len(first) > 1):
            return name
    return None if event.lora_id is None else f"lora_id:{event.lora_id}"


class Tier(IntEnum):
    """A class of memory, ordered from the fastest to the slowest."""

    GPU = 0
    CPU = 1
    DISK = 2
    UNKNOWN = 3


# `indexer/native/media.hpp` has the same tables. An event without medium is about GPU memory.
_TIER_OF_MEDIUM: Final = {
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
    "FS": Tier.DISK,
}
_POOLS: Final = frozenset({"EXTERNAL", "SHARED_STORAGE", "OBJ", "OBJECT_STORE"})
_POOLS_IN_LOWER_CASE: Final = frozenset({"cpu", "disk"})
# Media whose events carry the whole identity of a block: adapter, cache salt and keys of media.
_IDENTIFIED: Final = frozenset({None, "", "GPU", "CPU_PINNED", "DISK"})


def tier_of(medium: str | None) -> Tier:
    """Return the tier of a medium; UNKNOWN, the slowest, for an unknown name."""
    return _TIER_OF_MEDIUM.get(medium, Tier.UNKNOWN)


def canonical_medium(medium: str | None) -> str | None:
    """Return the usual spelling of a medium; the name itself if it is unknown, or a pool's name in lower case."""
    if medium is None or medium in _TIER_OF_MEDIUM or medium in _POOLS_IN_LOWER_CASE:
        return medium
    upper = medium.upper()
    return upper if upper in _TIER_OF_MEDIUM or upper in _POOLS else medium


def is_pooled(medium: str | None, locality: str | None = None) -> bool:
    """Return whether other workers can load blocks in this medium too. `locality` may declare it by `REMOTE`."""
    return medium in _POOLS or medium in _POOLS_IN_LOWER_CASE or locality == "REMOTE"


def is_identified(medium: str | None) -> bool:
    """Return whether events in this medium carry a block's whole identity. Those of vLLM's connectors do not."""
    return medium in _IDENTIFIED
