"""Linear policies, whose cost is a line over the tokens that a target would have to compute:

    cost = fixed + transfer + per_token · max(tokens - overlap - shares · shared, least_uncached)

    fixed, per_token   from the target's load (`line`)
    shares             1 where sessions share the price of a copy, else 0
    shared             uncached tokens for which other sessions pay (`router.policies.shared_tokens`)
    transfer           cached tokens in CPU memory or on disk, each at the price of loading it

Calling a policy with candidates computes all costs: that is the specification. The router keeps the lines of all
targets as columns instead and calls `cheapest_row`. So no record of a target is made, and native code scans the
columns in one call. `choose` is the reference implementation of that scan.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Collection
from math import inf
from random import Random
from typing import TypeAlias

from indexer.native import native_core
from router.policies.records import Candidate, CostUnit, Decision, Request, Source, one_of_lowest, one_of_tied
from router.policies.shared_tokens import SharedTokens

# `fixed`, `per_token` and `shares` of a target.
Line: TypeAlias = tuple[float, float, float]
Choose: TypeAlias = Callable[
    [
        "array[float]",
        "array[float]",
        "array[float]",
        "array[int]",
        int,
        int,
        "array[int]",
        "array[float]",
        "dict[int, float]",
        float,
    ],
    list[int],
]
Highest: TypeAlias = Callable[["array[int]"], int]
Holders: TypeAlias = Callable[["array[int]", int], int]

_NOBODY = SharedTokens(array("I"), array("d"))


class CostColumns:
    """The cost lines of `rows` targets; all values are 0 until they are set."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.fixed = array("d", bytes(8 * rows))
        self.per_token = array("d", bytes(8 * rows))
        self.shares = array("d", bytes(8 * rows))
        native = native_core()
        self.choose: Choose = native.choose if native is not None else choose
        self.highest: Highest = native.highest if native is not None else highest
        self.holders: Holders = native.holders if native is not None else holders


def choose(
    fixed: array[float],
    per_token: array[float],
    shares: array[float],
    held: array[int],
    tokens: int,
    least: int,
    depths: array[int],
    others: array[float],
    replaced: dict[int, float],
    near: float,
) -> list[int]:
    """Return the rows whose cost exceeds the lowest by at most the share `near`, in order; without infinite costs.

    - `held`: each row's cached tokens.
    - `depths`, `others`: the tokens for which other sessions pay, as in `SharedTokens`.
    - `replaced`: the costs of rows that do not follow from their line.
    """
    shared, costs = SharedTokens(depths, others), list[float]()
    for row, known in enumerate(held):
        uncached = tokens - paid(known, shares[row], shared)
        costs.append(fixed[row] + per_token[row] * (uncached if uncached > least else least))
    for row, cost in replaced.items():
        costs[row] = cost
    lowest = min(costs, default=inf)
    if lowest == inf:
        return []
    most = lowest * (1 + near) if near else lowest
    return [row for row, cost in enumerate(costs) if cost <= most]


def paid(held: int, share: float, shared: SharedTokens) -> int:
    """Return a row's cached tokens, and those for which other sessions pay."""
    return held + int(share * shared.after(held))


def highest(held: array[int]) -> int:
    """Return the highest number of a column; 0 if it is empty."""
    return max(held, default=0)


def holders(held: array[int], tokens: int) -> int:
    """Return how many rows of a column hold at least a number of tokens."""
    return sum(known >= tokens for known in held)


class LinearPolicy(ABC):
    """A policy with a linear cost in `unit`, of which the lowest wins. Costs within the share `near` of it are ties."""

    def __init__(
        self,
        random: Random,
        cpu_token: float = 0.0,
        disk_token: float = 0.0,
        near: float = 0.0,
        least_uncached: int = 1,
        unit: CostUnit = CostUnit.TOKENS,
    ) -> None:
        self.random = random
        self.cpu_token = cpu_token
        self.disk_token = disk_token
        self.near = near
        self.least_uncached = least_uncached
        self.unit = unit

    @abstractmethod
    def line(self, candidate: Candidate) -> Line:
        """Return the cost line of a target with this load."""

    @abstractmethod
    def terms(self, candidate: Candidate, request: Request) -> dict[str, float]:
        """Return the terms of a prompt's cost for display. Their sum is the cost, or differs from it by a constant."""

    def cost(self, fixed: float, per_token: float, tokens: int, overlap: int, cpu: int, disk: int) -> float:
        """Return the cost of a prompt on a target. `cpu`, `disk`: the cached tokens that are loaded from there."""
        uncached = tokens - overlap
        if uncached < self.least_uncached:
            uncached = self.least_uncached
        if cpu or disk:
            fixed += self.cpu_token * cpu + self.disk_token * disk
        return fixed + uncached * per_token

    def cost_of(self, candidate: Candidate, request: Request) -> float:
        """Return the cost of a prompt on a candidate. Sources count if `cost_with` says so."""
        if candidate.source is not None:
            return self.cost_with(candidate, candidate.source, request)
        return self.cost_after(candidate, candidate.overlap, request)

    def cost_after(self, candidate: Candidate, reused: int, request: Request) -> float:
        """Return the cost of a prompt on a candidate that computes all but its first `reused` tokens."""
        tokens, (fixed, per_token, shares) = request.tokens, self.line(candidate)
        if shares and request.shared is not None:
            tokens -= int(shares * request.shared.after(reused))
        return self.cost(fixed, per_token, tokens, reused, candidate.cpu, candidate.disk)

    def cost_with(self, candidate: Candidate, source: Source, request: Request) -> float:  # noqa: ARG002
        """Return the cost of a prompt on a candidate that has a source: here, as if it had none."""
        return self.cost_after(candidate, candidate.overlap, request)

    def __call__(self, candidates: list[Candidate], request: Request) -> Decision:
        totals = list[float]()
        for candidate in candidates:
            totals.append(self.cost_of(candidate, request))
        chosen = one_of_lowest(candidates, totals, self.random, self.near)
        return Decision(chosen, candidates, lambda candidate: self.terms(candidate, request), unit=self.unit)

    def cheapest_row(
        self,
        columns: CostColumns,
        request: Request,
        held: array[int],
        transfers: dict[int, tuple[int, int]],
        excluded: Collection[int],
        sources: dict[int, Candidate],
    ) -> int | None:
        """Return the chosen row; None if all are excluded.

        - `transfers`: rows' tokens in CPU memory and on disk.
        - `sources`: the candidates of rows that have a source.
        """
        tokens, shared = request.tokens, request.shared or _NOBODY
        replaced: dict[int, float] = {}
        for row, (cpu, disk) in transfers.items():
            reused = held[row] if request.shared is None else paid(held[row], columns.shares[row], shared)
            replaced[row] = self.cost(columns.fixed[row], columns.per_token[row], tokens, reused, cpu, disk)
        for row, candidate in sources.items():
            replaced[row] = self.cost_of(candidate, request)
        for row in excluded:
            replaced[row] = inf
        rows = columns.choose(
            columns.fixed,
            columns.per_token,
            columns.shares,
            held,
            tokens,
            self.least_uncached,
            shared.depths,
            shared.others,
            replaced,
            self.near,
        )
        return self.one_of(rows)

    def one_of(self, rows: list[int]) -> int | None:
        """Return any of the rows with the lowest cost; None without rows."""
        if not rows:
            return None
        return rows[0] if len(rows) == 1 and not self.near else one_of_tied(rows, self.random)
