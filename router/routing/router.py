"""The way of a request to its target:

    read ──▶ candidates ──▶ policy ──▶ reserve ──▶ record in flight ──▶ answered

    read              the model behind the name, and the prompts as tokens       `prompt_reader`
    candidates        who could take it, what they hold of it and have to do     `candidates`, `overlaps`
    policy            the cheapest of them                                       `router.policies`
    reserve           its share of that target's load, in the same step          `reservations`
    record in flight  its prompts count as held soon
    answered          what the engine says of its tokens teaches what follows

A request that finds every target at its limits, or its own busy, waits in `router.admission` and chooses again.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from random import Random

from http_api.errors import RequestError
from indexer import Indexer
from router.apis.requests import RoutedRequest
from router.apis.response_owners import ResponseOwners
from router.apis.usage import Usage
from router.cache_state.hit_audit import HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes
from router.cache_state.sent_prefixes import SentPrefixes
from router.cache_state.session_locations import SessionLocations
from router.fleet.fleet import Fleet, Worker
from router.load.target_load import LoadTable
from router.policies import ByTurn, Candidate, LinearPolicy, NamedPolicy
from router.policies.rates import prefill_seconds
from router.prediction.learned import Learned
from router.prediction.slo import SLO, Prediction
from router.routing.assignment import Assignment, RequestSampler
from router.routing.candidates import CandidateFinder, CandidateSet, without
from router.routing.disaggregation.adapters import Adapter
from router.routing.disaggregation.selection import DisaggregatedSelector
from router.routing.errors import unavailable, unknown_model
from router.routing.late_binding import NO_TIME_TO_SPARE, is_sooner
from router.routing.limits import NO_LIMITS, Limits
from router.routing.overlaps import OverlapFinder
from router.routing.prebuilt_selections import PrebuiltSelections
from router.routing.prompt_reader import PromptReader
from router.routing.reservations import Reservations
from router.routing.routed_prompt import RoutedPrompt
from router.routing.selection import Selection
from router.routing.slo_selection import SLOSelector
from router.settings import DisaggregationSettings
from router.sharing import LoadSharing
from router.tokens.tokenizers import Tokenizers


class Router:
    """Places requests on targets."""

    def __init__(
        self,
        fleet: Fleet,
        indexer: Indexer,
        tokenizers: Tokenizers,
        policy: NamedPolicy,
        load: LoadTable,
        in_flight_prefixes: InFlightPrefixes,
        learned: Learned,
        sent_prefixes: SentPrefixes,
        audit: HitAudit,
        sharing: LoadSharing,
        disaggregation: DisaggregationSettings,
        broken_promise: float = 40_000.0,
    ) -> None:
        """`broken_promise`: the cost of a missed SLO, in prefill tokens."""
        random = Random()
        overlaps = OverlapFinder(indexer, in_flight_prefixes, sharing.peer_load, sent_prefixes, audit)
        self._fleet = fleet
        self._indexer = indexer
        self._learned = learned
        self._policy = policy.choose
        self._linear = policy.choose if isinstance(policy.choose, LinearPolicy) else None
        self._reader = PromptReader(fleet, indexer, tokenizers, policy.spec.reads_prompts)
        self._candidates = CandidateFinder(
            fleet, load, sharing.peer_load, overlaps, learned, random, self._linear, policy.spec.uses_rates
        )
        self._disaggregated = DisaggregatedSelector(self._candidates, policy.choose, disaggregation, random)
        self._promised = SLOSelector(learned, sharing.peer_load, broken_promise)
        self._reservations = Reservations(
            indexer, load, in_flight_prefixes, learned, sent_prefixes, audit, sharing, self._promised.prediction
        )
        self._prebuilt: PrebuiltSelections | None = None
        if isinstance(policy.choose, ByTurn):
            self._prebuilt = PrebuiltSelections(fleet, self._candidates.directory, policy.choose, random)

    @property
    def needs_prompts(self) -> bool:
        """Whether anything looks at prompts now: the policy, or a recording."""
        return self._reader.needs_prompts

    @property
    def responses(self) -> ResponseOwners:
        """Which worker made which response."""
        return self._candidates.responses

    def sample_requests(self, sampler: RequestSampler) -> None:
        """Let `sampler` see some of the requests that are placed."""
        self._reservations.sampler = sampler

    # Read

    def look_at_prompts(self, wanted: bool) -> None:
        """Something beside the policy wants to know the prompts, or does not any more."""
        self._reader.look_at_prompts(wanted)

    def resolve(self, name: str, tenant: str) -> tuple[str, str | None]:
        """The model and adapter behind a name. Raises RequestError (404) when no worker serves it."""
        return self._reader.resolve(name, tenant)

    async def read(self, request: RoutedRequest, body_bytes: int) -> RoutedPrompt:
        """Tokenize a request's prompts. Raises RequestError for a model that no worker serves and an invalid prompt."""
        return self.read_now(request, body_bytes) or await self.read_aside(request, body_bytes)

    def read_now(self, request: RoutedRequest, body_bytes: int) -> RoutedPrompt | None:
        """The same at once; None when it takes longer than the event loop may be held up: then `read_aside` does it.

        Raises the same errors.
        """
        return self._reader.read_now(request, body_bytes)

    async def read_aside(self, request: RoutedRequest, body_bytes: int) -> RoutedPrompt:
        """The same for what `read_now` leaves: in a thread, or by a worker. Raises the same errors."""
        return await self._reader.read_aside(request, body_bytes)

    # Candidates and policy

    def choose(
        self,
        prompt: RoutedPrompt,
        excluded: Collection[Worker] = (),
        limits: Limits = NO_LIMITS,
        now: float | None = None,
        slo: SLO | None = None,
    ) -> Selection | None:
        """The selection as it would be now; None when all targets are at their limits.

        `excluded`: workers it may not go to. `now`: by `time.monotonic`, where it was just read. `promise`: what the
        request was promised, if anything. Raises RequestError (503) when no worker is left.
        """
        by_load = not self._reader.needs_prompts and limits.unlimited
        prebuilt = self._prebuilt if by_load and not prompt.stored else None
        if prebuilt is not None and slo is None and not excluded and not self._fleet.disaggregated:
            selection = prebuilt.choose(prompt.name)
            if selection is not None:
                return selection
        if now is None:
            now = time.monotonic()
        if not by_load:
            self._learned.look_at_evictions(self._indexer, now)
        found = self._candidates.find(prompt, excluded, limits, now, by_load=by_load)
        if found.count:
            if slo is not None:
                return self._keeping(prompt, excluded, found, slo, now)
            selection = self._cheapest(prompt, excluded, found, now)
            if self._learned.predictions.promising and not self._fleet.disaggregated:
                return self._promised.spare_others(found, selection, prompt, now)
            return selection
        if without(self._fleet.able(prompt.name), excluded):
            return None
        if prompt.name is not None and not self._fleet.serving(prompt.name):
            raise unknown_model(self._fleet, prompt.name)
        raise unavailable(f"No worker {f'for model {prompt.name!r} ' if prompt.name else ''}can be reached.")

    def _keeping(
        self, prompt: RoutedPrompt, excluded: Collection[Worker], found: CandidateSet, slo: SLO, now: float
    ) -> Selection:
        """The selection that keeps a promise, where there is one.

        Where a prompt is computed by another worker than decodes the answer, nothing is predicted.
        """
        selection = self._cheapest(prompt, excluded, found, now)
        if self._fleet.disaggregated:
            selection.slo = slo
            return selection
        return self._promised.select(found, selection, prompt, slo, now)

    def _cheapest(
        self, prompt: RoutedPrompt, excluded: Collection[Worker], found: CandidateSet, now: float
    ) -> Selection:
        """The selection that the policy makes of what was found."""
        if self._linear is not None and not found.rates and not self._fleet.disaggregated:
            selection = found.cheapest(self._linear, prompt.tokens)
            if selection is not None:
                return selection
        request = self._candidates.request(prompt, found)
        if self._fleet.disaggregated:
            return self._disaggregated.select(prompt, excluded, found, request, now)
        return found.select(self._policy(found.candidates, request))

    def prediction(self, candidate: Candidate, prompt: RoutedPrompt) -> Prediction:
        """What a candidate is predicted to take for a prompt that is sent now."""
        rank = self._candidates.directory.of(prompt.name).of_target[candidate.target]
        return self._promised.prediction(rank, candidate, prompt)

    @property
    def places(self) -> SessionLocations:
        """Where the sessions that were said to go on have their prefix."""
        return self._learned.places

    def prefill_seconds(self, prompt: RoutedPrompt) -> float:
        """How long a prompt's prefill would take where most of it is cached; all of it where no worker is left."""
        try:
            selection = self.choose(prompt)
        except RequestError:
            selection = None
        if selection is None:
            return prefill_seconds(self._learned.rates.start, prompt.tokens, 0, 0, 0)
        best = max(selection.decision.candidates, key=lambda candidate: candidate.overlap)
        rates = self._learned.rates.likely(best.target.worker, best.target.model)
        return prefill_seconds(rates, prompt.tokens, best.overlap, best.requests, best.context)

    # What admission asks

    def unless_held(
        self, prompt: RoutedPrompt, excluded: Collection[Worker], limits: Limits, selection: Selection, held: int
    ) -> Selection | None:
        """The selection, or another by which a request is answered sooner; None where it better waits for its target.

        `held`: how many requests wait.
        """
        if not self._is_busy(selection, crowded=True):
            return selection
        sooner = self._sooner(prompt, excluded, limits, selection)
        if sooner is None and self._is_busy(selection, crowded=held > selection.decision.count):
            return None
        return sooner or selection

    def _is_busy(self, selection: Selection, crowded: bool) -> bool:
        """Whether its target is busy with the prompts of others. Where there is no other there is nothing to wait for.

        `crowded`: more requests wait than there are targets.
        """
        return selection.decision.count > 1 and self._candidates.capacity.prefill_busy(selection.rank, crowded)

    def _sooner(
        self, prompt: RoutedPrompt, excluded: Collection[Worker], limits: Limits, selection: Selection
    ) -> Selection | None:
        """Where a request is answered sooner than by its selection, which is busy, while the fleet has time to spare.

        What was promised something has been placed by that.
        """
        prefilling = self._candidates.prefill_share(prompt)
        if prefilling >= NO_TIME_TO_SPARE or selection.slo is not None or self._fleet.disaggregated:
            return None
        now = time.monotonic()
        free = self._candidates.free(self._candidates.find(prompt, excluded, limits, now))
        if not free.count:
            return None
        other = self._cheapest(prompt, excluded, free, now)
        there, here = other.decision.chosen, selection.decision.chosen
        return other if is_sooner(there, here, prompt.tokens, prefilling) else None

    def has_capacity(self, worker: Worker, dp_rank: int, limits: Limits, tokens: int) -> bool:
        """Whether a rank may get one more request."""
        return self._candidates.capacity.has_capacity(worker, dp_rank, limits, tokens)

    def awaits_worker(self, prompt: RoutedPrompt) -> bool:
        """Whether a request may wait for the first worker of its model."""
        return prompt.name is not None and self._fleet.awaits(prompt.name)

    def any_has_capacity(
        self, prompt: RoutedPrompt, excluded: Collection[Worker], limits: Limits, held: int | None = None
    ) -> bool:
        """Whether any target could take a request now: it may be worth choosing again.

        `held`: how many wait, where late binding lets them.
        """
        return self._candidates.any_has_capacity(prompt, excluded, limits, held)

    def others(self, prompt: RoutedPrompt, excluded: Collection[Worker], prefill: bool = False) -> bool:
        """Whether there is any other worker that could take a request now, or compute a prompt for others."""
        return self._candidates.others(prompt, excluded, prefill)

    def adapter_of(self, worker: Worker) -> type[Adapter] | None:
        """How a decode worker goes on from a prefill worker; None where that is not known."""
        return self._disaggregated.adapter_of(worker)

    # Reserve, record in flight, answered

    def place(self, prompt: RoutedPrompt, excluded: Collection[Worker] = ()) -> Assignment:
        """All of it at once, whatever the load. Raises RequestError (503) when no worker is left."""
        selection = self.choose(prompt, excluded)
        assert selection is not None
        now = time.monotonic()
        assignment = self.reserve(prompt, selection, now)
        self.record_in_flight(prompt, assignment, now)
        return assignment

    def reserve(self, prompt: RoutedPrompt, selection: Selection, now: float | None = None) -> Assignment:
        """Reserve a request's share of the load, in the same step as the selection; `record_in_flight` follows."""
        if now is None:
            now = time.monotonic()
        return self._reservations.reserve(prompt, selection, now, self._reader.needs_prompts)

    def record_in_flight(self, prompt: RoutedPrompt, assignment: Assignment, now: float | None = None) -> None:
        """Count the prompts of a reserved request as held soon. Only the first call counts."""
        if now is None:
            now = time.monotonic()
        self._reservations.record_in_flight(prompt, assignment, now)

    def answered(self, assignment: Assignment, usage: Usage | None) -> None:
        """A worker answered a request in full; `usage` is what it says of the tokens."""
        self._reservations.answered(assignment, usage)

    def forget(self, worker: Worker) -> None:
        """A worker's cache was reset: it holds nothing any more."""
        self._reservations.forget_holdings(worker)

    def replaced(self, worker: Worker) -> None:
        """A worker serves another model under a name: what it was sent before says nothing."""
        self._reservations.forget_sent(worker)

    def removed(self, worker: Worker) -> None:
        """A worker is gone: nothing of it is kept."""
        self._reservations.removed(worker)
