"""Which blocks go where: random ones to random places, the same on both sides of a transfer."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ARENA = 1 << 28  # bytes on each side, more than a processor's cache
SIZES = {"4 KiB": 1 << 12, "64 KiB": 1 << 16, "1 MiB": 1 << 20, "16 MiB": 1 << 24}
_BATCH = 1 << 27  # bytes of a batch, if its blocks are not too many
_BLOCKS = 8192


class Blocks(NamedTuple):
    """`size` bytes each, from and to these offsets in the arenas."""

    size: int
    sources: NDArray[np.uint64]
    destinations: NDArray[np.uint64]

    @property
    def total(self) -> int:
        """Bytes in all."""
        return self.size * len(self.sources)


@cache
def batch(size: int, blocks: int | None = None) -> Blocks:
    """The batch of a block size, or its first `blocks` blocks."""
    if blocks is not None:
        whole = batch(size)
        return Blocks(size, whole.sources[:blocks], whole.destinations[:blocks])
    count = min(_BATCH // size, _BLOCKS)
    random = np.random.default_rng(size)
    places = [(random.permutation(ARENA // size)[:count] * size).astype(np.uint64) for _ in range(2)]
    return Blocks(size, *places)
