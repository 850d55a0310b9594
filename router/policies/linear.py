"""Policies whose cost is a straight line of the tokens that a target would have to compute:

    cost = fixed + transfer + per_token · max(tokens - overlap, least_uncached)

    fixed, per_token   by the load of the target alone (`line`)
    transfer           cached tokens in CPU memory or on disk, each at the price of loading it

A policy that is called with candidates goes through all of them: that is the specification. The router keeps the lines
of all targets as columns instead and asks `cheapest_row`: then a decision costs what the targets cost that hold
something of the prompt, not what the fleet costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from random import Random

from router.policies.cost_columns import CostColumns
from router.policies.records import Candidate, CostUnit, Decision, Request, one_of_lowest, one_of_tied


class LinearPolicy(ABC):
    """The cost above; the lowest wins. `near`: costs that are higher by this share at most count as tied. `unit`: of
    the cost."""

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
    def line(self, candidate: Candidate) -> tuple[float, float]:
        """`fixed` and `per_token` of a target with this load."""

    @abstractmethod
    def terms(self, candidate: Candidate, tokens: int) -> dict[str, float]:
        """The terms of the cost of a prompt, for people. They add up to the cost, or differ from it by a constant."""

    def cost(self, fixed: float, per_token: float, tokens: int, overlap: int, cpu: int, disk: int) -> float:
        """The cost of a prompt of `tokens` on a target with this line that holds `overlap` of them.

        `cpu` and `disk` of these have to be loaded from there.
        """
        uncached = tokens - overlap
        if uncached < self.least_uncached:
            uncached = self.least_uncached
        if cpu or disk:
            fixed += self.cpu_token * cpu + self.disk_token * disk
        return fixed + uncached * per_token

    def __call__(self, candidates: list[Candidate], request: Request) -> Decision:
        tokens, totals = request.tokens, list[float]()
        for candidate in candidates:
            fixed, per_token = self.line(candidate)
            totals.append(self.cost(fixed, per_token, tokens, candidate.overlap, candidate.cpu, candidate.disk))
        chosen = one_of_lowest(candidates, totals, self.random, self.near)
        return Decision(chosen, candidates, lambda candidate: self.terms(candidate, tokens), unit=self.unit)

    def cheapest_row(
        self,
        columns: CostColumns,
        tokens: int,
        overlaps: dict[int, int],
        transfers: dict[int, tuple[int, int]],
        excluded: Collection[int],
    ) -> int | None:
        """The row of the target that is chosen for a prompt; None where all are excluded.

        `overlaps`: the cached tokens of rows that have any; `transfers`: how many of them are in CPU memory and on
        disk, of rows that have any there.
        """
        fixed, per_token, least = columns.fixed, columns.per_token, self.least_uncached
        # `cost` where nothing has to be loaded: there may be thousands of rows.
        known = {
            row: fixed[row] + (uncached if (uncached := tokens - overlap) > least else least) * per_token[row]
            for row, overlap in overlaps.items()
        }
        for row, (cpu, disk) in transfers.items():
            known[row] = self.cost(fixed[row], per_token[row], tokens, overlaps[row], cpu, disk)
        if excluded and known:
            known = {row: cost for row, cost in known.items() if row not in excluded}
        uncached = tokens if tokens > least else least
        rows = columns.cheapest(uncached, known, excluded, self.near)
        if not rows:
            return None
        return rows[0] if len(rows) == 1 and not self.near else one_of_tied(rows, self.random)
