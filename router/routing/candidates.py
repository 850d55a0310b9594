"""The candidates of a request: the targets that may receive it, with their load and their overlap.

One file, because what is excluded and what is found of a prompt share the rows of one view.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection
from functools import partial
from random import Random

from indexer import MatchQuery, RowMatches
from indexer.index import ChosenRows
from router.apis.requests import RoutedRequest
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS
from router.fleet.worker import Worker, choosable, has_turn
from router.policies import Candidate, Decision, LinearPolicy, Request
from router.policies.rates import Rates
from router.policies.records import Source
from router.policies.shared_tokens import SharedTokens
from router.routing.assignment import NO_HASHES, Selection
from router.routing.late_binding import NO_TIME_TO_SPARE
from router.routing.load_view import LoadView
from router.routing.native_choice import NativeChoice
from router.routing.overlaps import OverlapFinder
from router.routing.ranks import NO_LIMITS, Limits, RoutableRank, ServedModel, TargetCapacity, without
from router.routing.sources import SourceFinder
from router.routing.state import RoutingState
from router.routing.target_directory import ModelTargets, TargetDirectory
from router.settings import PullProtocol

# Prompts that begin with this many equal chunks count as one session when the client names none.
_SESSION_CHUNKS = 32
_NO_ROWS: frozenset[int] = frozenset()


class Overlaps:
    """The overlaps of a request's prompts with all targets, by row. Amounts are in tokens.

    - `tokens`: the overlap that counts.
    - `by_events`: the overlap by events and prompts in flight, for rows in which it differs.
    - `transfers`: the tokens in CPU memory and on disk, for rows that have any there.
    """

    __slots__ = ("_empty", "by_events", "tokens", "transfers")

    def __init__(self, nothing: array[int]) -> None:
        """Create empty overlaps. `nothing`: an `array("I")` with a zero for each row, which is never changed."""
        self.tokens = nothing
        self.by_events: dict[int, int] = {}
        self.transfers: dict[int, tuple[int, int]] = {}
        self._empty = True

    def add(self, found: RowMatches, by_events: dict[int, int]) -> None:
        """Add the overlaps of one more prompt. `by_events`: its overlaps by events, for rows in which they differ."""
        if self._empty:
            self._empty = False
            self.tokens, self.transfers, self.by_events = found.tokens, found.transfers, by_events
            return
        for row in self.by_events.keys() | by_events.keys():
            self.by_events[row] = self.by_events.get(row, self.tokens[row]) + by_events.get(row, found.tokens[row])
        self.tokens = array("I", map(int.__add__, self.tokens, found.tokens))
        for row, (cpu, disk) in found.transfers.items():
            before = self.transfers.get(row, (0, 0))
            self.transfers[row] = before[0] + cpu, before[1] + disk


class CandidateSet:
    """The candidates of one request, as rows of a name's targets.

    - `hashes`: the chunk hashes of its prompts, by the model that is served under the name.
    - `lowest`: the rows with the lowest cost, if the native call found them.
    - `rates`: the rates of the slowest worker, by model; only if workers differ.
    - `shared`: the parts of its prompt that several sessions asked for; None without any.
    """

    __slots__ = (
        "_candidates",
        "_finder",
        "count",
        "excluded",
        "hashes",
        "lowest",
        "overlaps",
        "rates",
        "shared",
        "sources",
        "targets",
        "view",
    )

    def __init__(
        self, finder: CandidateFinder, targets: ModelTargets, view: LoadView, excluded: Collection[int]
    ) -> None:
        self._finder = finder
        self._candidates: list[Candidate] | None = None
        self.targets = targets
        self.view = view
        self.excluded = excluded
        self.hashes: dict[ServedModel, list[array[int]]] = {}
        self.overlaps = Overlaps(targets.nothing)
        self.rates: dict[ServedModel, Rates] = {}
        self.sources: dict[int, Source] = {}
        self.shared: SharedTokens | None = None
        self.lowest: list[int] | None = None
        self.count = len(targets.ranks) - len(excluded)

    @property
    def candidates(self) -> list[Candidate]:
        """A record of each candidate, for policies that read all of them, and for explanations."""
        if self._candidates is None:
            self._candidates = self.records()
        return self._candidates

    def records(self, chosen: Candidate | None = None) -> list[Candidate]:
        """Return a record of each candidate with its present load. `chosen`: a record to keep as it was."""
        records = self.view.records.copy()
        if self.rates:
            records = [self._finder.with_rates(self, row, record) for row, record in enumerate(records)]
        for row, tokens in enumerate(self.overlaps.tokens):
            if tokens or row in self.sources:
                records[row] = self.with_overlap(row, records[row])
        if chosen is not None:
            records[self.targets.of_target[chosen.target].row] = chosen
        if self.excluded:
            records = [record for row, record in enumerate(records) if row not in self.excluded]
        return records

    def read(self, chosen: ChosenRows) -> None:
        """Read the result of the native call, which has the only prompt and the only model."""
        overlaps = self.overlaps
        self.lowest, overlaps.tokens, overlaps.transfers, overlaps.by_events, _, _, depths, others, chunks = chosen
        self.hashes[self.targets.served[0]] = [chunks]
        if depths:
            self.shared = SharedTokens(array("I", depths), array("d", others))

    def without(self, rows: Collection[int]) -> CandidateSet:
        """Return the candidates without some rows."""
        left = CandidateSet(self._finder, self.targets, self.view, {*self.excluded, *rows})
        left.hashes, left.overlaps, left.rates = self.hashes, self.overlaps, self.rates
        left.sources, left.shared = self.sources, self.shared
        return left

    def with_overlap(self, row: int, record: Candidate) -> Candidate:
        """Return a row's record with its overlap and its source."""
        tokens, source = self.overlaps.tokens[row], self.sources.get(row)
        if not tokens and source is None:
            return record
        record = record.copy()
        record.source = source
        record.overlap = tokens
        record.cpu, record.disk = self.overlaps.transfers.get(row, (0, 0))
        return record

    def rank_of(self, candidate: Candidate) -> RoutableRank:
        return self.targets.of_target[candidate.target]

    def cheapest(self, tokens: int) -> Selection | None:
        """Return the selection for a prompt of `tokens` tokens by the columns of costs; None if they do not decide."""
        policy = self._finder.linear
        if policy is None or self.rates:
            return None
        overlaps, records, lowest = self.overlaps, self.view.records, self.lowest
        request = Request(tokens, shared=self.shared)
        if lowest is not None and not self.sources:
            row: int | None = lowest[0] if len(lowest) == 1 else policy.one_of(lowest)
        else:
            sources = {row: self.with_overlap(row, records[row]) for row in self.sources}
            row = policy.cheapest_row(
                self.view.columns, request, overlaps.tokens, overlaps.transfers, self.excluded, sources
            )
        if row is None:
            return None
        chosen = self.with_overlap(row, records[row])
        decision = Decision(
            chosen,
            partial(self.records, chosen),
            partial(policy.terms, request=request),
            count=self.count,
            unit=policy.unit,
        )
        return self._selection(decision, self.targets.ranks[row])

    def select(self, decision: Decision) -> Selection:
        """Return the selection of a policy's decision."""
        return self._selection(decision, self.rank_of(decision.chosen))

    def _selection(self, decision: Decision, rank: RoutableRank) -> Selection:
        overlaps, excluded = self.overlaps, self.excluded
        if excluded:
            best = max([tokens for row, tokens in enumerate(overlaps.tokens) if row not in excluded], default=0)
        else:
            best = self.view.columns.highest(overlaps.tokens)
        hashes = self.hashes.get(rank.served, NO_HASHES)
        by_events = overlaps.by_events.get(rank.row, overlaps.tokens[rank.row])
        return Selection(decision, rank, hashes, by_events, best)


class CandidateFinder:
    """Finds the candidates of a request.

    - `linear`: the policy, if the columns of its costs decide.
    - `native`: the choice in one call, of which `find` reads the overlaps; None to find all of them step by step.
    """

    def __init__(
        self, state: RoutingState, directory: TargetDirectory, capacity: TargetCapacity, random: Random
    ) -> None:
        policy = state.policy.choose
        self._directory = directory
        self._index = state.indexer.index
        self._sessions = state.gate.sessions
        self._capacity = capacity
        self._indexer = state.indexer
        self._fleet = state.fleet
        self._load = state.load
        self._peer_load = state.sharing.peer_load
        self._responses = state.responses
        self._overlaps = OverlapFinder(state)
        self._learned = state.learned
        self._sources = state.sources
        self._pulls = state.pulls
        self._random = random
        self._policy = policy if isinstance(policy, LinearPolicy) else None
        self.linear = self._policy if state.policy.custom is None else None
        self.native: NativeChoice | None = NativeChoice(state, self._policy, self._overlaps)
        self._needs_rates = state.policy.spec.uses_rates

    def find(
        self,
        prompt: RoutedRequest,
        excluded: Collection[Worker],
        limits: Limits,
        now: float,
        prefill: bool = False,
        by_load: bool = False,
        pulls: Collection[PullProtocol] = tuple(PullProtocol),
    ) -> CandidateSet:
        """Return the candidates for a prompt, without `excluded` workers; or those for its prefill alone.

        - `by_load`: leave overlaps out, because nothing reads them.
        - `pulls`: the forms in which the request can name a peer to pull from.
        """
        targets = self._directory.of(prompt.name, prefill)
        view = targets.view
        if view is None:
            sessions = self._sessions
            view = targets.view = LoadView(
                targets.ranks, self._load, self._learned, self._policy, targets.prefill_share, self._index, sessions
            )
            for worker, ranks in targets.of_worker.items():
                memory = self._memory_of(worker)
                for rank in ranks:
                    rank.load.limit.discovered(memory)
        view.update(now)
        owner = self._responses.get(prompt.stored) if prompt.stored else None
        if owner is None:
            if targets.lengths is not None:
                excluded = [*excluded, *targets.too_short(prompt.context, excluded)]
            if targets.refusing or targets.lacking_routes or (targets.lacks and prompt.needs):
                excluded = targets.without_unable(prompt.path, prompt.needs, excluded)
        rows = self._excluded_rows(targets, view, prompt, excluded, limits, owner)
        if prompt.dp_rank is not None and not prefill:
            rows = {*rows, *(rank.row for rank in targets.ranks if rank.target.dp_rank != prompt.dp_rank)}
        found = CandidateSet(self, targets, view, rows)
        if by_load:
            return found
        spare = 1 - targets.prefill_share.observed / NO_TIME_TO_SPARE if len(targets.ranks) > 1 else 0.0
        if self._needs_rates:
            for served in targets.served:
                if slowest := self._learned.rates.slowest_if_unlike(served.model, now):
                    found.rates[served] = slowest
        chosen = None
        if self.native is not None and prompt.reads_cache:
            chosen = self.native.find(targets, view, prompt, rows, spare, now)
        if chosen is None:
            self._find_in_steps(prompt, found, spare, now)
        else:
            found.read(chosen)
        if self._sources is not None and prompt.reads_cache and len(prompt.token_ids) == 1:
            self._find_sources(self._sources, prompt, found, pulls)
        return found

    def _find_in_steps(self, prompt: RoutedRequest, found: CandidateSet, spare: float, now: float) -> None:
        """Find the overlaps of the candidates, and the parts of the prompt that several sessions asked for."""
        targets = found.targets
        for served in targets.served:
            salt = prompt.cache_salt
            root = served.root if salt is None else served.root_of(salt)
            hashes: list[array[int]] = []
            found.hashes[served] = hashes
            for identity in prompt.identities:
                hashes.append(identity.all_hashes(root, CHUNK_TOKENS))
            if prompt.reads_cache:
                for matches, by_events in self._overlaps.find(targets, served, prompt, hashes, now):
                    found.overlaps.add(matches, by_events)
        if len(prompt.identities) == len(targets.served) == 1 and prompt.reads_cache and spare > 0:
            held, columns = found.overlaps.tokens, found.view.columns
            asked = self._learned.pressure.asked(found.hashes[targets.served[0]][0], columns.highest(held), now)
            if asked:
                found.shared = SharedTokens.paid(asked, lambda tokens: columns.holders(held, tokens), spare)

    def _find_sources(
        self, sources: SourceFinder, prompt: RoutedRequest, found: CandidateSet, forms: Collection[PullProtocol]
    ) -> None:
        """Find the sources of the candidates for a request with one prompt. Events do not report replaced adapters."""
        targets, pulls = found.targets, self._pulls is None or self._pulls.allows(prompt.path, prompt.answers, forms)
        for served in targets.served:
            if served.replacement is None:
                query = MatchQuery(served.model, prompt.token_ids[0], served.adapter, prompt.cache_salt)
                ranks = [rank for rank in targets.ranks if rank.served is served]
                verified = prompt.verified if len(targets.served) == 1 else ()
                found.sources.update(sources.find(query, ranks, found.overlaps.tokens, verified, pulls))

    def request(self, prompt: RoutedRequest, found: CandidateSet, now: float) -> Request:
        """Return a prompt as policies see it. Prompts without a session that begin alike count as one session."""
        served = found.rank_of(found.candidates[0]).served
        hashes = found.hashes.get(served, NO_HASHES)
        beginning = hashes[0][min(len(hashes[0]), _SESSION_CHUNKS) - 1] if hashes and hashes[0] else None
        expected = self._learned.outputs.of_request(served.model, prompt)
        return Request(prompt.tokens, expected, prompt.session, beginning, now, found.shared)

    def with_rates(self, found: CandidateSet, row: int, record: Candidate) -> Candidate:
        """Return a row's record with the rates of its target, if workers differ."""
        rank = found.targets.ranks[row]
        slowest = found.rates.get(rank.served)
        if slowest is None:
            return record
        target, record = rank.target, record.copy()
        record.rates = self._learned.rates.learned_or(target.worker, target.model, slowest)
        record.backlog = rank.load.backlog + self._peer_load.backlog(target.worker, target.dp_rank)
        return record

    def _excluded_rows(
        self,
        targets: ModelTargets,
        view: LoadView,
        prompt: RoutedRequest,
        excluded: Collection[Worker],
        limits: Limits,
        owner: str | None,
    ) -> Collection[int]:
        """Return the rows that may not receive a request. While the `owner` of its stored object is up, it may."""
        unsettled = targets.unsettled
        full = self._fleet.full() if limits is not NO_LIMITS and self._fleet.may_be_full else ()
        if not excluded and not unsettled and not full and limits.unlimited and owner is None:
            return _NO_ROWS
        if owner is None:
            closed = [*excluded, *full] if full else excluded
            rows = self._excluded_one_by_one(targets, view, prompt, closed, limits, unsettled)
            if rows is not None:
                return rows
        rows = set(range(len(targets.ranks)))
        rows.difference_update([rank.row for rank in self._usable(targets, prompt, excluded, full, limits, owner)])
        return rows

    def _excluded_one_by_one(
        self,
        targets: ModelTargets,
        view: LoadView,
        prompt: RoutedRequest,
        excluded: Collection[Worker],
        limits: Limits,
        unsettled: list[Worker],
    ) -> set[int] | None:
        """Return the excluded rows, from excluded, unsettled and full workers only; None if no row would be left."""
        rows: set[int] = set()
        for worker in excluded:
            rows.update([rank.row for rank in targets.of_worker.get(worker, [])])
        if not limits.unlimited:
            rows.update(self._without_capacity(targets, view, prompt, limits))
        open_rows = 0
        for worker in unsettled:
            ranks = [rank for rank in targets.of_worker[worker] if rank.row not in rows]
            if ranks and has_turn(worker, self._random):
                usable = worker.health.usable_ranks(worker.ranks())
                open_rows += len(ranks)
                closed = [rank.row for rank in ranks if rank.target.dp_rank not in usable]
                open_rows -= len(closed)
                rows.update(closed)
            else:
                rows.update([rank.row for rank in ranks])
        return rows if len(rows) + open_rows < len(targets.ranks) else None

    def _without_capacity(
        self, targets: ModelTargets, view: LoadView, prompt: RoutedRequest, limits: Limits
    ) -> list[int]:
        """Return the rows whose targets have no capacity for a request."""
        each_row = limits.requests is not None or limits.tokens is not None or bool(limits.closed)
        each_row |= limits.paced and not limits.late_binding
        usual = prompt.hints is None and prompt.answers == 1 and not each_row
        unsure = view.tight if limits.late_binding else view.tight | view.prefilling
        if usual and not unsure and prompt.tokens + view.longest_output <= view.always_fits:
            return []
        demand, has_capacity, ranks = self._capacity.demand(prompt), self._capacity.has_capacity, targets.ranks
        if not each_row and demand.tokens + max(map(demand.output, targets.served), default=0) <= view.always_fits:
            return [row for row in unsure if not has_capacity(ranks[row], limits, demand)]
        return [rank.row for rank in ranks if not has_capacity(rank, limits, demand)]

    def _usable(
        self,
        targets: ModelTargets,
        prompt: RoutedRequest,
        excluded: Collection[Worker],
        full: Collection[Worker],
        limits: Limits,
        owner: str | None,
    ) -> list[RoutableRank]:
        """Return the ranks that may receive a request now, from a check of each."""
        workers = without(targets.workers, excluded)
        owners = [each for each in workers if each.url == owner] if owner else []
        has_capacity, demand = self._capacity.has_capacity, self._capacity.demand(prompt)

        def any_rank_has_capacity(worker: Worker) -> bool:
            return any(has_capacity(rank, limits, demand) for rank in targets.of_worker[worker])

        unlimited = limits.unlimited and not full
        ranks = targets.usable(owners or choosable(workers, self._random, None if unlimited else any_rank_has_capacity))
        if unlimited:
            return ranks
        return [rank for rank in ranks if has_capacity(rank, limits, demand)]

    def scraped(self, worker: Worker) -> None:
        """Read a worker's load again, because its metrics were read."""
        capacity = self._memory_of(worker)
        for dp_rank in worker.ranks():
            self._load.scraped(worker.url, dp_rank, worker.metrics.get(dp_rank), capacity)
        if worker.metrics.caches_prefixes:
            self._overlaps.uncached.discard(worker.url)
        else:
            self._overlaps.uncached.add(worker.url)

    def _memory_of(self, worker: Worker) -> int | None:
        """Return the tokens that limit each rank of a worker; None for no limit.

        A model that keeps only the last tokens of prompts in some layers needs less memory than its prompts have
        tokens. It is not known how much less, so its memory is no limit.
        """
        windowed = any(self._indexer.window(target) is not None for target in worker.targets)
        return None if windowed else worker.capacity_tokens

    def removed(self, worker: Worker) -> None:
        """Forget a worker that was removed."""
        self._overlaps.uncached.discard(worker.url)
