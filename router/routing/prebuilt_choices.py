"""Targets to choose from where nothing counts but their turn: made once, and again when the fleet has changed."""

from __future__ import annotations

from random import Random

from router.fleet.fleet import Fleet
from router.policies import ByTurn, Candidate
from router.routing.selection import Selection
from router.routing.target_directory import RoutableRank, TargetDirectory


class _Turns:
    """The targets of a name, and the choice of each that was chosen before: it is the same each time."""

    def __init__(self, ranks: list[RoutableRank]) -> None:
        self.ranks = ranks
        self.candidates = [Candidate(rank.target) for rank in ranks]
        self.choices: list[Selection | None] = [None] * len(ranks)


class PrebuiltChoices:
    """The targets of each name, and of those whose turn has come the choice.

    What became of a worker since they were found is looked at when its turn has come.
    """

    def __init__(self, fleet: Fleet, servers: TargetDirectory, policy: ByTurn, random: Random) -> None:
        self._fleet = fleet
        self._servers = servers
        self._policy = policy
        self._random = random
        self._version = -1
        self._known: dict[str | None, _Turns] = {}

    def choose(self, name: str | None) -> Selection | None:
        """The next one whose worker takes a request of this name; None when it has to be looked for among all."""
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._known.clear()
        turns = self._known.get(name) or self._find(name)
        for _ in turns.ranks:
            turn = self._policy.turn(len(turns.ranks))
            rank = turns.ranks[turn]
            worker = rank.worker
            if worker.takes_now(name, self._random) and (
                not rank.one_of_many or worker.health.usable(rank.target.dp_rank)
            ):
                return turns.choices[turn] or self._choose(turns, turn)
        return None

    def _find(self, name: str | None) -> _Turns:
        turns = _Turns(self._servers.of(name).ranks)
        if turns.ranks:  # else nobody serves it, and there is no end of such names
            self._known[name] = turns
        return turns

    def _choose(self, turns: _Turns, turn: int) -> Selection:
        decision = self._policy.decision(turns.candidates, turn)
        choice = turns.choices[turn] = Selection(decision, turns.ranks[turn])
        return choice
