"""Targets to choose from where nothing counts but their turn: made once, and again when the fleet has changed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from router.fleet.fleet import Fleet
from router.policies import Candidate, Policy, Request
from router.routing.choice import Choice, Option

# Nothing of a request counts.
_ANY = Request(0)


class _Options(NamedTuple):
    options: list[Option]
    candidates: list[Candidate]
    of_candidate: dict[int, Option]


class Standing:
    """The options for each name, as `made`. What became of a worker since then is looked at when its turn has come."""

    def __init__(
        self, fleet: Fleet, made: Callable[[str | None], list[Option]], policy: Policy, random: Random
    ) -> None:
        self._fleet = fleet
        self._made = made
        self._policy = policy
        self._random = random
        self._version = -1
        self._known: dict[str | None, _Options] = {}

    def choose(self, name: str | None) -> Choice | None:
        """The next one whose worker takes a request of this name; None when it has to be looked for among all."""
        if self._version != self._fleet.version:
            self._version = self._fleet.version
            self._known.clear()
        options, candidates, of_candidate = self._known.get(name) or self._make(name)
        for _ in options:
            decision = self._policy(candidates, _ANY)
            option = of_candidate[id(decision.choice)]
            worker = option.worker
            if worker.takes_now(name, self._random) and worker.health.usable(decision.choice.target.dp_rank):
                return Choice(decision, options, option)
        return None

    def _make(self, name: str | None) -> _Options:
        options = self._made(name)
        made = _Options(options, [each.candidate for each in options], {id(each.candidate): each for each in options})
        if options:  # else nobody serves it, and there is no end of such names
            self._known[name] = made
        return made
