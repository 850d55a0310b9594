"""The costs of all targets as two columns, and the lowest cost without a look at every row.

A linear policy's cost of a prompt is a line of its uncached tokens:

    cost(row) = fixed[row] + uncached · per_token[row]

Rows come in blocks, and each block knows the lowest of both columns. No row of a block costs less than
`lowest fixed + uncached · lowest per_token`, so most blocks are passed over.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Final

# Rows of a block. A fleet of no more targets is one block: then a choice is one pass over it.
BLOCK: Final = 64
_INFINITE: Final = float("inf")


class CostColumns:
    """The lines of `rows` targets. All are 0 until they are set."""

    def __init__(self, rows: int) -> None:
        blocks = -(-rows // BLOCK)
        self.rows = rows
        self.fixed = [0.0] * rows
        self.per_token = [0.0] * rows
        self._lowest_fixed = [0.0] * blocks
        self._lowest_per_token = [0.0] * blocks
        self._changed: set[int] = set()  # blocks whose lowest may have become higher

    def set(self, row: int, fixed: float, per_token: float) -> None:
        """A row's line."""
        block = row // BLOCK
        if fixed <= self._lowest_fixed[block]:
            self._lowest_fixed[block] = fixed
        elif self.fixed[row] <= self._lowest_fixed[block]:
            self._changed.add(block)
        if per_token <= self._lowest_per_token[block]:
            self._lowest_per_token[block] = per_token
        elif self.per_token[row] <= self._lowest_per_token[block]:
            self._changed.add(block)
        self.fixed[row] = fixed
        self.per_token[row] = per_token

    def cheapest(
        self, uncached: float, known: Mapping[int, float], excluded: Collection[int], near: float = 0.0
    ) -> list[int]:
        """The rows with the lowest cost, in order; empty where all are excluded.

        `known`: rows whose cost is another than their line's, with that cost. `excluded`: others, which do not count.
        `near`: costs that are higher than the lowest by this share at most count as well.
        """
        lowest, rows = _lowest_of(known)
        if len(known) + len(excluded) < self.rows:
            bounds = self._bounds(uncached)
            first = bounds.index(
                min(bounds)
            )  # most likely the lowest cost is there, and lets the others be passed over
            for block in _first_of(first, len(bounds)):
                if bounds[block] > lowest:
                    continue
                start = block * BLOCK
                costs = self._costs(start, uncached)
                for row in [row for row, cost in enumerate(costs, start) if cost <= lowest]:
                    if row in known or row in excluded:
                        continue
                    cost = costs[row - start]
                    if cost < lowest:
                        lowest, rows = cost, [row]
                    elif cost == lowest:
                        rows.append(row)
        if near and rows:
            return self._up_to(lowest * (1 + near), uncached, known, excluded)
        rows.sort()
        return rows

    def _up_to(self, most: float, uncached: float, known: Mapping[int, float], excluded: Collection[int]) -> list[int]:
        """The rows that cost `most` at most, in order."""
        rows = [row for row, cost in known.items() if cost <= most]
        for block, bound in enumerate(self._bounds(uncached)):
            if bound <= most:
                start = block * BLOCK
                rows += [
                    row
                    for row, cost in enumerate(self._costs(start, uncached), start)
                    if cost <= most and row not in known and row not in excluded
                ]
        rows.sort()
        return rows

    def _costs(self, start: int, uncached: float) -> list[float]:
        """The costs of a block's rows."""
        fixed, per_token = self.fixed[start : start + BLOCK], self.per_token[start : start + BLOCK]
        return [a + uncached * b for a, b in zip(fixed, per_token, strict=True)]

    def _bounds(self, uncached: float) -> list[float]:
        """What no row of each block costs less than."""
        for block in self._changed:
            start = block * BLOCK
            self._lowest_fixed[block] = min(self.fixed[start : start + BLOCK])
            self._lowest_per_token[block] = min(self.per_token[start : start + BLOCK])
        self._changed.clear()
        return [a + uncached * b for a, b in zip(self._lowest_fixed, self._lowest_per_token, strict=True)]


def _lowest_of(known: Mapping[int, float]) -> tuple[float, list[int]]:
    """The lowest of known costs, and the rows that have it."""
    if not known:
        return _INFINITE, []
    lowest = min(known.values())
    return lowest, [row for row, cost in known.items() if cost == lowest]


def _first_of(first: int, count: int) -> Iterator[int]:
    """`first`, then the others of `count`."""
    yield first
    for each in range(count):
        if each != first:
            yield each
