"""What can be chosen for a request, and what was."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import NamedTuple

from indexer import Target
from router.disaggregation.decision import Disaggregation
from router.fleet.worker import Worker
from router.policies import Candidate, Decision
from router.routing.servers import Rank, Served, Serving


class Chosen(NamedTuple):
    """The target that a request goes to, and the prefix hashes of its prompts there.

    `by_events`: the overlap by events and prompts in flight, whether or not it is the one used.
    """

    candidate: Candidate
    rank: Rank
    hashes: list[array[int]]
    by_events: int


class Options:
    """What a request has to choose from. `candidates` are all targets that could take it.

    `hashes`: the prefix hashes of its prompts, by what is served under the name it asks for. `by_events`: the overlap
    by events and prompts in flight of the targets that have any, whether or not it is the one used.
    """

    __slots__ = ("_serving", "by_events", "candidates", "hashes")

    def __init__(self, serving: Serving) -> None:
        self.candidates: list[Candidate] = []
        self.hashes: dict[Served, list[array[int]]] = {}
        self.by_events: dict[Target, int] = {}
        self._serving = serving

    def rank_of(self, candidate: Candidate) -> Rank:
        """The rank that a candidate is."""
        return self._serving.of_target[candidate.target]

    def hashes_for(self, candidate: Candidate) -> list[array[int]]:
        """The prefix hashes of the prompts that a candidate would get."""
        return self.hashes.get(self.rank_of(candidate).served, [])

    def choose(self, decision: Decision) -> Choice:
        """The choice that a policy has decided for."""
        candidate = decision.choice
        rank = self.rank_of(candidate)
        hashes, by_events = self.hashes.get(rank.served, []), self.by_events.get(candidate.target, 0)
        return Choice(decision, Chosen(candidate, rank, hashes, by_events))


@dataclass(slots=True)
class Choice:
    """A decision that nothing has been reserved for yet.

    `disaggregation`: whether another worker computes the prompt, where the choice is a decode worker; `prefill` is the
    choice of that.
    """

    decision: Decision
    chosen: Chosen
    disaggregation: Disaggregation | None = None
    prefill: Choice | None = None

    @property
    def worker(self) -> Worker:
        return self.chosen.rank.worker
