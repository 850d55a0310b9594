"""The layout of a pool's objects, as far as an engine reports it. The rest is learned from the keys."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The objects of an engine's blocks in a pool, and its loads, as it reports them.

    - `prefix`: the beginning of all its keys; empty if it is not known.
    - `objects`: the fewest objects of a block.
    - `trailing`: endings of the keys of objects that only the last blocks of a load need.
    - `trailing_blocks`: the number of those blocks.
    - `least_tokens`: the fewest tokens that it loads.
    """

    prefix: str = ""
    objects: int = 1
    trailing: tuple[str, ...] = ()
    trailing_blocks: int = 0
    least_tokens: int = 1
