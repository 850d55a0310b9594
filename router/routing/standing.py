"""Targets to choose from where nothing counts but their turn: made once, and again when the fleet has changed."""

from __future__ import annotations

from random import Random

from router.fleet.fleet import Fleet
from router.policies import ByTurn, Candidate
from router.routing.choice import Choice, Chosen
from router.routing.servers import Servers


class Standing:
    """The choices for each name, one for each of the targets that serve it.

    What became of a worker since then is looked at when its turn has come.
    """

    def __init__(self, fleet: Fleet, servers: Servers, policy: ByTurn, random: Random) -> None:
        self._fleet = fleet
        self._servers = servers
        self._policy = policy
        self._random = random
        self._version = -1
        self._known: dict[str | None, list[Choice]] = {}

    def choose(self, name: str | None) -> Choice | None:
        """The next one whose worker takes a request of this name; None when it has to be looked for among all."""
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._known.clear()
        choices = self._known.get(name) or self._make(name)
        for _ in choices:
            choice = choices[self._policy.turn(len(choices))]
            rank = choice.chosen.rank
            worker = rank.worker
            if worker.takes_now(name, self._random) and (
                not rank.one_of_many or worker.health.usable(rank.target.dp_rank)
            ):
                return choice
        return None

    def _make(self, name: str | None) -> list[Choice]:
        ranks = list(self._servers.of(name).of_target.values())
        candidates = [Candidate(rank.target) for rank in ranks]
        choices = [
            Choice(self._policy.decision(candidates, turn), Chosen(candidates[turn], rank, [], 0))
            for turn, rank in enumerate(ranks)
        ]
        if choices:  # else nobody serves it, and there is no end of such names
            self._known[name] = choices
        return choices
