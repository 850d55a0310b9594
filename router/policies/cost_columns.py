"""The costs of all targets as columns, which the native core scans; the reference implementation is in this module.

A linear policy's cost of a prompt is a line over its uncached tokens:

    cost(row) = fixed[row] + per_token[row] · max(tokens - held[row], least)
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from math import inf
from typing import TypeAlias

from indexer.native import native_core

Costs: TypeAlias = Callable[["array[float]", "array[float]", "array[int]", int, int, "array[float]"], None]
Highest: TypeAlias = Callable[["array[int]"], int]
Lowest: TypeAlias = Callable[["array[float]", float], list[int]]


class CostColumns:
    """The cost lines of `rows` targets; all values are 0 until they are set."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.fixed = array("d", bytes(8 * rows))
        self.per_token = array("d", bytes(8 * rows))
        self._costs = array("d", bytes(8 * rows))
        native = native_core()
        self._write_costs: Costs = native.costs if native is not None else write_costs
        self.lowest: Lowest = native.lowest if native is not None else lowest
        self.highest: Highest = native.highest if native is not None else highest

    def set(self, row: int, fixed: float, per_token: float) -> None:
        """Set a row's line."""
        self.fixed[row] = fixed
        self.per_token[row] = per_token

    def costs(self, tokens: int, held: array[int], least: int) -> array[float]:
        """Return the cost of a prompt of `tokens` for each row; the next call overwrites the result.

        `held` has the cached tokens of each row as an `array("I")`.
        """
        self._write_costs(self.fixed, self.per_token, held, tokens, least, self._costs)
        return self._costs


def write_costs(
    fixed: array[float], per_token: array[float], held: array[int], tokens: int, least: int, costs: array[float]
) -> None:
    """Write each row's cost into `costs`."""
    rows = zip(fixed, per_token, held, strict=True)
    costs[:] = array("d", [a + b * (new if (new := tokens - known) > least else least) for a, b, known in rows])


def lowest(costs: array[float], near: float) -> list[int]:
    """Return the rows whose cost exceeds the lowest by at most the share `near`, in order; without infinite costs."""
    least = min(costs, default=inf)
    if least == inf:
        return []
    most = least * (1 + near) if near else least
    return [row for row, cost in enumerate(costs) if cost <= most]


def highest(held: array[int]) -> int:
    """Return the highest number of a column; 0 if it is empty."""
    return max(held, default=0)
