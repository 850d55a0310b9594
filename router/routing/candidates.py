"""Which targets could take a prompt, and what each has to do and holds of it: what a policy chooses from."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from random import Random

from indexer import Target
from router.apis.response_owners import ResponseOwners
from router.fleet.fleet import Fleet, Worker
from router.fleet.load import LoadTable
from router.fleet.worker import choosable
from router.holdings.speculation import chunk_hashes, chunk_root
from router.learning.learned import Learned
from router.policies import Candidate, Decision, Request
from router.policies.rates import Rates
from router.routing.limits import Limits
from router.routing.overlaps import Overlap, OverlapFinder
from router.routing.routed_prompt import RoutedPrompt
from router.routing.selection import NO_HASHES, Selection
from router.routing.target_capacity import TargetCapacity
from router.routing.target_directory import ModelTargets, RoutableRank, ServedModel, TargetDirectory
from router.sharing import PeerLoad

# Prompts that begin with this many equal chunks count as one session when the client names none.
_SESSION_CHUNKS = 32
# How often the load of all targets is read again: what an engine said of its load becomes too old.
_REFRESH_SECONDS = 0.5


class CandidateSet:
    """What a request has to choose from. `candidates` are all targets that could take it.

    `hashes`: the chunk hashes of its prompts, by what is served under the name it asks for. `overlaps`: of the targets
    that have any. `best_overlap`: the most tokens that any candidate has.
    """

    __slots__ = ("_targets", "best_overlap", "candidates", "hashes", "overlaps")

    def __init__(self, targets: ModelTargets) -> None:
        self._targets = targets
        self.candidates: list[Candidate] = []
        self.hashes: dict[ServedModel, list[array[int]]] = {}
        self.overlaps: dict[Target, Overlap] = {}
        self.best_overlap = 0

    def with_overlap(self, candidate: Candidate, overlap: Overlap) -> Candidate:
        """A candidate with what it has of the request's prompts."""
        self.overlaps[candidate.target] = overlap
        self.best_overlap = max(self.best_overlap, overlap.tokens)
        candidate = candidate.copy()
        candidate.overlap, candidate.cpu, candidate.disk = overlap.tokens, overlap.cpu, overlap.disk
        return candidate

    def rank_of(self, candidate: Candidate) -> RoutableRank:
        """The rank that a candidate is."""
        return self._targets.of_target[candidate.target]

    def hashes_for(self, rank: RoutableRank) -> list[array[int]]:
        """The chunk hashes of the prompts that a rank would get."""
        return self.hashes.get(rank.served, NO_HASHES)

    def select(self, decision: Decision) -> Selection:
        """The selection that a policy's decision makes."""
        rank = self.rank_of(decision.chosen)
        overlap = self.overlaps.get(rank.target)
        return Selection(decision, rank, self.hashes_for(rank), overlap.by_events if overlap else 0, self.best_overlap)


class CandidateFinder:
    """Finds the candidates of a request. `needs_rates`: the policy reads how fast workers are."""

    def __init__(
        self,
        fleet: Fleet,
        load: LoadTable,
        peer_load: PeerLoad,
        overlaps: OverlapFinder,
        learned: Learned,
        random: Random,
        needs_rates: bool,
    ) -> None:
        self.directory = TargetDirectory(fleet, load)
        self.capacity = TargetCapacity(load, peer_load)
        self.responses = ResponseOwners()
        self._load = load
        self._peer_load = peer_load
        self._overlaps = overlaps
        self._learned = learned
        self._random = random
        self._needs_rates = needs_rates
        self._refresh_at = 0.0
        fleet.on_scrape.append(self._scraped)
        peer_load.on_change.append(load.changed)

    def find(
        self, prompt: RoutedPrompt, excluded: Collection[Worker], limits: Limits, now: float, prefill: bool = False
    ) -> CandidateSet:
        """Every target that could take a prompt now, with what it holds of it and has to do.

        `prefill`: those that only compute it, for others to go on.
        """
        targets = self.directory.of(prompt.name, prefill)
        found = CandidateSet(targets)
        eviction = self._learned.pressure.price()
        for served, ranks in self._usable(targets, prompt, excluded, limits).items():
            salt = prompt.cache_salt
            root = served.root if salt is None else chunk_root(served.model, served.adapter, salt)
            hashes = found.hashes[served] = [chunk_hashes(root, identity) for identity in prompt.identities]
            candidates = self._loaded(ranks, now)
            if self._needs_rates and (slowest := self._learned.rates.slowest_if_unlike(served.model, now)):
                candidates = [self._with_rates(rank, candidates[place], slowest) for place, rank in enumerate(ranks)]
            if eviction:
                candidates = [self._with_eviction(candidate, eviction) for candidate in candidates]
            overlaps = self._overlaps.find(served, prompt, hashes, now)
            places = None if ranks is targets.of_served[served] else {rank: n for n, rank in enumerate(ranks)}
            for target, overlap in overlaps.items():
                rank = targets.of_target.get(target)
                if rank is None or rank.served is not served:
                    continue
                place = rank.place if places is None else places.get(rank, -1)
                if place >= 0:
                    candidates[place] = found.with_overlap(candidates[place], overlap)
            found.candidates += candidates
        return found

    def find_by_load(self, name: str | None, excluded: Collection[Worker], now: float) -> CandidateSet:
        """The same where nothing of a prompt counts and nothing is limited."""
        targets = self.directory.of(name)
        found = CandidateSet(targets)
        if not excluded and targets.all_usable:
            found.candidates = self._loaded(targets.ranks, now)
        else:
            usable = choosable(without(targets.workers, excluded), self._random)
            found.candidates = self._loaded(targets.usable(usable), now)
        return found

    def request(self, prompt: RoutedPrompt, found: CandidateSet) -> Request:
        """What a policy knows of a prompt. Without a session, prompts that begin alike count as one."""
        first = found.rank_of(found.candidates[0])
        hashes = found.hashes_for(first)
        beginning = hashes[0][min(len(hashes[0]), _SESSION_CHUNKS) - 1] if hashes and hashes[0] else None
        expected = self._learned.outputs.expected(first.served.model, prompt.max_tokens)
        return Request(prompt.tokens, expected * prompt.answers, prompt.session, beginning)

    def any_has_capacity(
        self, prompt: RoutedPrompt, excluded: Collection[Worker], limits: Limits, late_binding: bool
    ) -> bool:
        """Whether any target could take a request now: it may be worth choosing again."""
        of_target = self.directory.of(prompt.name).of_target
        ranks = [rank for rank in of_target.values() if rank.worker not in excluded]
        late_binding = late_binding and len(ranks) > 1
        return any(
            self.capacity.has_capacity(rank.worker, rank.target.dp_rank, limits, prompt.tokens)
            and not (late_binding and self.capacity.prefill_busy(rank))
            for rank in ranks
        )

    def others(self, prompt: RoutedPrompt, excluded: Collection[Worker], prefill: bool = False) -> bool:
        """Whether there is any other worker that could take a request now, or compute a prompt for others."""
        workers = self.directory.of(prompt.name, prefill).workers
        return len(workers) > len(excluded) or any(worker not in excluded for worker in workers)

    def _usable(
        self, targets: ModelTargets, prompt: RoutedPrompt, excluded: Collection[Worker], limits: Limits
    ) -> dict[ServedModel, list[RoutableRank]]:
        """The ranks that a request may go to now, by what they serve under its name.

        What goes on from a response goes to the worker that made it, as long as that one is there.
        """
        if not excluded and limits.unlimited and not prompt.previous_response and targets.all_usable:
            return targets.of_served
        workers = without(targets.workers, excluded)
        owner = prompt.previous_response and self.responses.of(prompt.previous_response)
        owners = [each for each in workers if each.url == owner] if owner else []
        has_capacity = self.capacity.has_capacity

        def any_rank_has_capacity(worker: Worker) -> bool:
            return any(has_capacity(worker, dp_rank, limits, prompt.tokens) for dp_rank in worker.ranks())

        usable: dict[ServedModel, list[RoutableRank]] = {}
        for rank in targets.usable(
            owners or choosable(workers, self._random, None if limits.unlimited else any_rank_has_capacity)
        ):
            if limits.unlimited or has_capacity(rank.worker, rank.target.dp_rank, limits, prompt.tokens):
                usable.setdefault(rank.served, []).append(rank)
        return usable

    def _loaded(self, ranks: list[RoutableRank], now: float) -> list[Candidate]:
        """Targets with what they have to do. They are shared with other requests, and not to be changed.

        A candidate is made again only when its load or that of its peers has changed, and all of them now and then.
        """
        if now >= self._refresh_at:
            self._refresh_at = now + _REFRESH_SECONDS
            self.directory.invalidate()
        return [
            rank.candidate if rank.candidate_version == rank.load.version else self._with_load(rank) for rank in ranks
        ]

    def _with_load(self, rank: RoutableRank) -> Candidate:
        """A target with its load, in proportion to its worker's weight.

        That is what this router and its peers have in flight there, and requests that none of them sent.
        """
        target, load = rank.target, rank.load
        peers = self._peer_load.of(target.worker, target.dp_rank)
        engine = rank.worker.metrics.of(target.dp_rank)
        rank.candidate = candidate = Candidate(
            target,
            requests=load.requests + peers.requests + engine.unseen,
            pending=load.pending + peers.pending,
            context=load.context + peers.context,
            waiting=len(load.prefills) + peers.waiting + engine.waiting,
            kv_usage=engine.kv_usage,
        )
        if (weight := rank.weight) != 1:
            candidate.requests = round(candidate.requests / weight)
            candidate.pending = round(candidate.pending / weight)
            candidate.context = round(candidate.context / weight)
        rank.candidate_version = load.version
        return candidate

    def _with_rates(self, rank: RoutableRank, candidate: Candidate, slowest: Rates) -> Candidate:
        """A target with its rates."""
        target, rated = rank.target, candidate.copy()
        rated.rates = self._learned.rates.of(target.worker, target.model, slowest)
        rated.backlog = rank.load.backlog + self._peer_load.backlog(target.worker, target.dp_rank)
        return rated

    def _with_eviction(self, candidate: Candidate, price: float) -> Candidate:
        """A target with what its evictions cost, if it evicts."""
        if not self._learned.pressure.evicting(candidate.target):
            return candidate
        candidate = candidate.copy()
        candidate.eviction = price
        return candidate

    def _scraped(self, worker: Worker) -> None:
        for dp_rank in worker.ranks():
            self._load.changed(worker.url, dp_rank)


def without(workers: Sequence[Worker], excluded: Collection[Worker]) -> Sequence[Worker]:
    """Those of some workers that are not excluded."""
    return [worker for worker in workers if worker not in excluded] if excluded else workers
