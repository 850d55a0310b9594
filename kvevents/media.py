"""Media of blocks in events: their tiers, and whether a medium belongs to the worker that reports it.

vLLM sends `GPU`, `CPU` and `STORAGE`; SGLang `GPU`, `CPU_PINNED`, `DISK` and `EXTERNAL`. Connectors to shared pools
send `cpu` and `disk` in lower case (Mooncake Store), `SHARED_STORAGE` (llm-d), `OBJ` and `OBJECT_STORE`.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


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
