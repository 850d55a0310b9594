"""What can be chosen for a request, and what was."""

from __future__ import annotations

from array import array

from indexer import Target
from router.disaggregation.decision import Disaggregation
from router.fleet.worker import Worker
from router.policies import Candidate, Decision
from router.routing.target_directory import ModelTargets, RoutableRank, ServedModel

_NO_HASHES: list[array[int]] = []


class Overlap:
    """What a target has of a request's prompts, in tokens.

    `by_events`: by events and prompts in flight, whether or not that is what counts. `cpu`, `disk`: what of `tokens`
    has to be loaded from there.
    """

    __slots__ = ("by_events", "cpu", "disk", "tokens")

    def __init__(self, tokens: int, by_events: int) -> None:
        self.tokens = tokens
        self.by_events = by_events
        self.cpu = 0
        self.disk = 0


class CandidateSet:
    """What a request has to choose from. `candidates` are all targets that could take it.

    `hashes`: the prefix hashes of its prompts, by what is served under the name it asks for. `overlaps`: of the targets
    that have any. `most`: the most tokens that any candidate has.
    """

    __slots__ = ("_serving", "candidates", "hashes", "most", "overlaps")

    def __init__(self, serving: ModelTargets) -> None:
        self.candidates: list[Candidate] = []
        self.hashes: dict[ServedModel, list[array[int]]] = {}
        self.overlaps: dict[Target, Overlap] = {}
        self.most = 0
        self._serving = serving

    def holding(self, candidate: Candidate, overlap: Overlap) -> Candidate:
        """A target with what it has of the request's prompts."""
        self.overlaps[candidate.target] = overlap
        self.most = max(self.most, overlap.tokens)
        candidate = candidate.copy()
        candidate.overlap, candidate.cpu, candidate.disk = overlap.tokens, overlap.cpu, overlap.disk
        return candidate

    def rank_of(self, candidate: Candidate) -> RoutableRank:
        """The rank that a candidate is."""
        return self._serving.of_target[candidate.target]

    def hashes_for(self, rank: RoutableRank) -> list[array[int]]:
        """The prefix hashes of the prompts that a rank would get."""
        return self.hashes.get(rank.served, _NO_HASHES)

    def choose(self, decision: Decision) -> Selection:
        """The choice that a policy has decided for."""
        rank = self.rank_of(decision.choice)
        overlap = self.overlaps.get(rank.target)
        return Selection(decision, rank, self.hashes_for(rank), overlap.by_events if overlap else 0, self.most)


class Selection:
    """A decision that nothing has been reserved for yet.

    `rank`: what was chosen; `hashes`: the prefix hashes of the request's prompts there. `by_events`: the overlap by
    events and prompts in flight, whether or not it is the one used. `most`: the most tokens that any candidate has.
    `disaggregation`: whether another worker computes the prompt, where the choice is a decode worker; `prefill` is the
    choice of that.
    """

    def __init__(
        self,
        decision: Decision,
        rank: RoutableRank,
        hashes: list[array[int]] = _NO_HASHES,
        by_events: int = 0,
        most: int = 0,
        disaggregation: Disaggregation | None = None,
        prefill: Selection | None = None,
    ) -> None:
        self.decision = decision
        self.rank = rank
        self.hashes = hashes
        self.by_events = by_events
        self.most = most
        self.disaggregation = disaggregation
        self.prefill = prefill

    @property
    def worker(self) -> Worker:
        return self.rank.worker
