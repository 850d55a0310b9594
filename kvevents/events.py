"""Records of the KV-cache events that an engine sends, and the memory tiers of their blocks.

Field names are vLLM's; SGLang's `cache_salt` is added. Sizes are in tokens. A block hash is the engine's own name
of a block: it is opaque, and valid only within one DP rank of one worker.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeAlias

import msgspec


class Tier(IntEnum):
    """A class of memory, ordered from the fastest to the slowest."""

    GPU = 0
    CPU = 1
    DISK = 2
    UNKNOWN = 3


# vLLM: GPU, CPU, STORAGE. SGLang: GPU, CPU_PINNED, DISK, EXTERNAL. An event without medium is about GPU memory.
_TIER_OF_MEDIUM = {
    None: Tier.GPU,
    "GPU": Tier.GPU,
    "CPU": Tier.CPU,
    "CPU_PINNED": Tier.CPU,
    "STORAGE": Tier.DISK,
    "DISK": Tier.DISK,
    "EXTERNAL": Tier.DISK,
}


def tier_of(medium: str | None) -> Tier:
    """Return the tier of a medium; UNKNOWN, the slowest, for an unknown name."""
    return _TIER_OF_MEDIUM.get(medium, Tier.UNKNOWN)


EngineHash: TypeAlias = int | bytes


class BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, gc=False):
    """Consecutive full blocks that an engine put into its cache, first block first.

    `token_ids` is flat: `block_size` ids for each hash. `parent_block_hash` names the block before the first one,
    None at the start of a sequence. `extra_keys` has one entry per block, which distinguishes equal tokens.
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
    """Changes that one engine step made in one DP rank's cache, in order.

    `ts` is the engine's clock (unix seconds). `rejected` lists the unreadable events.
    """

    ts: float
    events: list[Event]
    dp_rank: int | None = None
    rejected: list[RejectedEvent] = []
