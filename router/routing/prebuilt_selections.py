"""Selections where only the turn counts: made once, and again when the fleet has changed."""

from __future__ import annotations

from random import Random

from router.policies import ByTurn, Candidate
from router.routing.routable_rank import RoutableRank
from router.routing.selection import Selection
from router.routing.state import RoutedFleet
from router.routing.target_directory import TargetDirectory


class _Turns:
    """The targets of a name, and the selection of each that was chosen before: it is the same each time."""

    def __init__(self, ranks: list[RoutableRank]) -> None:
        self.ranks = ranks
        self.candidates = [Candidate(rank.target) for rank in ranks]
        self.selections: list[Selection | None] = [None] * len(ranks)


class PrebuiltSelections:
    """The targets of each name, and the selections of those whose turn has come.

    Whether a worker still takes requests is looked at when its turn has come.
    """

    def __init__(self, fleet: RoutedFleet, directory: TargetDirectory, policy: ByTurn, random: Random) -> None:
        self._fleet = fleet
        self._directory = directory
        self._policy = policy
        self._random = random
        self._version = -1
        self._turns: dict[str | None, _Turns] = {}

    def choose(self, name: str | None) -> Selection | None:
        """The next one whose worker takes a request of this name; None when it has to be looked for among all."""
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._turns.clear()
        turns = self._turns.get(name) or self._find(name)
        for _ in turns.ranks:
            turn = self._policy.turn(len(turns.ranks))
            rank = turns.ranks[turn]
            worker = rank.worker
            if worker.takes_now(name, self._random) and (
                not rank.one_of_many or worker.health.usable(rank.target.dp_rank)
            ):
                return turns.selections[turn] or self._select(turns, turn)
        return None

    def _find(self, name: str | None) -> _Turns:
        turns = _Turns(self._directory.of(name).ranks)
        if turns.ranks:  # else no worker serves it, and there is no end of such names
            self._turns[name] = turns
        return turns

    def _select(self, turns: _Turns, turn: int) -> Selection:
        decision = self._policy.decision(turns.candidates, turn)
        selection = turns.selections[turn] = Selection(decision, turns.ranks[turn])
        return selection
