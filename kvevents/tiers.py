"""Memory tiers, fastest first, and the engines' names of media."""

from __future__ import annotations

from enum import IntEnum


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
