"""Choosing a target for a request: what it asks, what each target holds and has to do, and the reservation."""

from __future__ import annotations

import time
from array import array
from collections.abc import Collection, Sequence
from dataclasses import replace
from random import Random
from typing import Final

import structlog

from indexer import Indexer, Match, MatchQuery, Target, UnknownModelError
from indexer.errors import RequestError
from indexer.hashing import PackedPrompt
from kvevents import Tier
from router.apis.body_cache import CACHE_BYTES, BodyCache
from router.apis.requests import RoutedRequest
from router.apis.response_owners import ResponseOwners
from router.apis.usage import Usage
from router.disaggregation.adapters import ADAPTERS, Adapter, Nixl, Sglang
from router.disaggregation.decision import decode_policy, disaggregate, prefill_policy
from router.fleet.discovery import Engine
from router.fleet.fleet import Fleet, Worker
from router.fleet.load import LoadTable, Reservation
from router.fleet.worker import choosable
from router.holdings.audit import HitAudit, Prediction
from router.holdings.history import RoutingHistory
from router.holdings.speculation import CHUNK_TOKENS, SpeculativeHoldings, chunk_hashes, chunk_root
from router.learning.learned import Learned
from router.policies import ByTurn, Candidate, Policy, Request
from router.policies.rates import Rates, prefill_seconds
from router.routing.assignment import Assignment, RequestSampler
from router.routing.late_binding import must_wait
from router.routing.limits import NO_LIMITS, Limits
from router.routing.prebuilt_choices import PrebuiltChoices
from router.routing.routed_prompt import RoutedPrompt, tokenized_prompt, unread_prompt
from router.routing.selection import CandidateSet, Overlap, Selection
from router.routing.target_directory import ModelTargets, RoutableRank, ServedModel, TargetDirectory
from router.settings import Backend, DisaggregationSettings, Role
from router.sharing import LoadSharing
from router.tokens.tokenizers import Tokenizers, TokenizerUnavailableError

log = structlog.get_logger()


# Members of an enumeration are looked up in it each time.
_CPU: Final = Tier.CPU
_DISK: Final = Tier.DISK
_UNKNOWN: Final = Tier.UNKNOWN

# Prompts that begin with so many equal chunks are taken for one session when nobody names theirs.
_SESSION_CHUNKS: Final = 32
# How often all targets are looked at: what an engine told of its load may be too old to count any more.
_LOOK_SECONDS: Final = 0.5


class Router:
    """Places requests on targets."""

    def __init__(
        self,
        fleet: Fleet,
        indexer: Indexer,
        tokenizers: Tokenizers,
        policy: Policy,
        load: LoadTable,
        speculation: SpeculativeHoldings,
        learned: Learned,
        history: RoutingHistory,
        audit: HitAudit,
        sharing: LoadSharing,
        disaggregation: DisaggregationSettings,
        needs_prompts: bool = True,
        seen_bytes: int = CACHE_BYTES,
    ) -> None:
        """`needs_prompts`: false when the policy looks at no prompt, so that nothing is tokenized or matched.

        `seen_bytes` bounds what is kept of the chats seen before.
        """
        self.needs_prompts = self._policy_needs_prompts = needs_prompts
        self.seen = BodyCache(seen_bytes)
        self._fleet = fleet
        self._indexer = indexer
        self._tokenizers = tokenizers
        self._policy = policy
        self._load = load
        self._servers = TargetDirectory(fleet, load)
        self._look_again_at = 0.0
        fleet.on_scrape.append(self._scraped)
        sharing.peer_load.on_change.append(load.changed)
        self._speculation = speculation
        self._learned = learned
        self._history = history
        self._audit = audit
        self._sharing = sharing
        self.responses = ResponseOwners()
        self.watching: RequestSampler | None = None
        self._watch_from = 0.0
        self._random = Random()
        self._disaggregation = disaggregation
        self._decode_policy = decode_policy(self._random)
        self._prefill_policy = prefill_policy(self._random)
        self._standing: PrebuiltChoices | None = None
        if isinstance(policy, ByTurn):
            self._standing = PrebuiltChoices(fleet, self._servers, policy, self._random)

    def look_at_prompts(self, wanted: bool) -> None:
        """Somebody wants to know the prompts, although the policy may look at none; or does not any more."""
        self.needs_prompts = wanted or self._policy_needs_prompts

    def resolve(self, name: str, tenant: str) -> tuple[str, str | None]:
        """The model and adapter behind a name. Raises RequestError (404) when nobody serves it."""
        serving = self._fleet.serving(name)
        if serving:
            return serving[0][1].model, serving[0][1].adapter
        if self._indexer.serves(name, tenant):
            return name, None
        raise self._unknown_model(name)

    async def read(self, request: RoutedRequest, body_bytes: int) -> RoutedPrompt:
        """Tokenize a request's prompts. Raises RequestError for a model nobody serves and for a prompt that is none."""
        return self.read_now(request, body_bytes) or await self.read_aside(request, body_bytes)

    def read_now(self, request: RoutedRequest, body_bytes: int) -> RoutedPrompt | None:
        """The same at once; None when it takes longer than the event loop may be held up: then `read_aside` does it.

        Raises the same errors.
        """
        request, model = self._asked(request)
        if not self.needs_prompts:
            return unread_prompt(request, body_bytes)
        if model is None or request.prompt is None:
            return unread_prompt(request, body_bytes)
        try:
            tokenized = self._tokenizers.tokenize_now(model, request.prompt, body_bytes)
        except (TokenizerUnavailableError, RequestError) as error:
            return _routed_by_load(request, body_bytes, error)
        return None if tokenized is None else tokenized_prompt(request, tokenized)

    async def read_aside(self, request: RoutedRequest, body_bytes: int) -> RoutedPrompt:
        """The same for what `read_now` leaves: in a thread, or by a worker. Raises the same errors."""
        request, model = self._asked(request)
        if model is None or request.prompt is None:
            return unread_prompt(request, body_bytes)
        try:
            tokenized = await self._tokenizers.tokenize_aside(model, request.prompt)
        except (TokenizerUnavailableError, RequestError) as error:
            return _routed_by_load(request, body_bytes, error)
        return tokenized_prompt(request, tokenized)

    def _asked(self, request: RoutedRequest) -> tuple[RoutedRequest, str | None]:
        """A request with the name of what it asks for, and the model behind it. Without a name any worker will do."""
        if request.model is None and request.prompt is not None:
            request = replace(request, model=self._only_model())
        if request.model is None:
            return request, None
        model = self._fleet.model_of(request.model)
        if model is None:
            raise self._unknown_model(request.model)
        return request, model

    def choose(
        self,
        prompt: RoutedPrompt,
        without: Collection[Worker] = (),
        limits: Limits = NO_LIMITS,
        now: float | None = None,
    ) -> Selection | None:
        """The choice as it would be now; None when all targets are at their limits. `now`: by `time.monotonic`, where
        it was just read.

        Raises RequestError (503) when no worker is left.
        """
        by_load = not self.needs_prompts and limits.unlimited
        if by_load and self._standing is not None and not without and not self._fleet.disaggregated:
            choice = self._standing.choose(prompt.name)
            if choice is not None:
                return choice
        if now is None:
            now = time.monotonic()
        if not by_load:
            self._learned.look_at_evictions(self._indexer, now)
            options = self._options(prompt, without, limits, now)
        else:
            options = self._options_by_load(prompt.name, without, now)
        if options.candidates:
            if self._fleet.disaggregated:
                return self._disaggregated(prompt, without, options, now)
            return options.choose(self._policy(options.candidates, self._request(prompt, options)))
        if self._serving_now(prompt.name, without):
            return None
        if prompt.name is not None and not self._fleet.serving(prompt.name):
            raise self._unknown_model(prompt.name)
        raise _unavailable(f"No worker {f'for model {prompt.name!r} ' if prompt.name else ''}can be reached.")

    def _disaggregated(
        self, prompt: RoutedPrompt, without: Collection[Worker], options: CandidateSet, now: float
    ) -> Selection:
        """The choice in a fleet with workers for prefill or decode alone."""
        candidates, request = options.candidates, self._request(prompt, options)
        if not any(options.rank_of(candidate).worker.role is Role.DECODE for candidate in candidates):
            return options.choose(self._policy(candidates, request))
        choice = options.choose(self._decode_policy(candidates, request))
        adapter = self.adapter_of(choice.worker)
        if choice.worker.role is not Role.DECODE or adapter is None or prompt.path not in adapter.paths:
            return choice
        prefills = self._options(prompt, without, NO_LIMITS, now, prefill=True)
        found = disaggregate(
            choice.decision.choice,
            prefills.candidates,
            request,
            self._prefill_policy,
            self._disaggregation,
            adapter.decodes_alone,
        )
        if found.prefill is not None:
            choice.prefill = prefills.choose(found.prefill)
        elif not adapter.decodes_alone:
            raise _unavailable("No prefill worker can be reached, and the decode workers compute no prompts.")
        choice.disaggregation = found
        return choice

    def adapter_of(self, worker: Worker) -> type[Adapter] | None:
        """How a decode worker goes on from a prefill worker; None where that is not known."""
        backend = self._disaggregation.backend
        if backend is not Backend.AUTO:
            return ADAPTERS[backend]
        return _ADAPTER_OF_ENGINE.get(worker.description.engine) if worker.description else None

    def busy(self, choice: Selection) -> bool:
        """Whether a request better waits than goes to its choice, because that is busy with the prompts of others.

        Where there is no other target there is nothing to wait for.
        """
        return len(choice.decision.candidates) > 1 and self._must_wait(choice.rank)

    def any_has_capacity(
        self, prompt: RoutedPrompt, without: Collection[Worker], limits: Limits, late_binding: bool
    ) -> bool:
        """Whether any target could take a request now: it may be worth choosing again."""
        of_target = self._servers.of(prompt.name).of_target
        ranks = [rank for rank in of_target.values() if rank.worker not in without]
        late_binding = late_binding and len(ranks) > 1
        return any(
            self.has_capacity(rank.worker, rank.target.dp_rank, limits, prompt.tokens)
            and not (late_binding and self._must_wait(rank))
            for rank in ranks
        )

    def prefill_seconds(self, prompt: RoutedPrompt) -> float:
        """How long a prompt's prefill would take where most of it is cached; all of it where nobody is left."""
        try:
            choice = self.choose(prompt)
        except RequestError:
            choice = None
        if choice is None:
            return prefill_seconds(self._learned.rates.start, prompt.tokens, 0, 0, 0)
        best = max(choice.decision.candidates, key=lambda candidate: candidate.overlap)
        rates = self._learned.rates.learner(best.target.worker, best.target.model).rates
        return prefill_seconds(rates, prompt.tokens, best.overlap, best.requests, best.context)

    def place(self, prompt: RoutedPrompt, without: Collection[Worker] = ()) -> Assignment:
        """Choose a target, whatever its load, and reserve a share. Raises RequestError (503) when no worker is left."""
        choice = self.choose(prompt, without)
        assert choice is not None
        now = time.monotonic()
        assignment = self.reserve(prompt, choice, now)
        self.record_in_flight(prompt, assignment, now)
        return assignment

    def reserve(self, prompt: RoutedPrompt, chosen: Selection, now: float | None = None) -> Assignment:
        """Reserve a request's share of its choice's load, in the same step as the choice; `record_in_flight` follows.

        `now`: by `time.monotonic`, where it was just read.
        """
        if now is None:
            now = time.monotonic()
        if chosen.disaggregation is None:
            return self._reserve(prompt, chosen, now)
        assignment = self._reserve(prompt, chosen, now, computes=chosen.prefill is None)
        if chosen.prefill is not None:
            assignment.prefill = self._reserve(prompt, chosen.prefill, now, decodes=False)
            assignment.attempt.waits_for_another()
        log.info(
            "disaggregation",
            decode=assignment.worker.url,
            prefill=assignment.prefill and assignment.prefill.worker.url,
            reason=chosen.disaggregation.reason,
            **chosen.disaggregation.inputs,
        )
        return assignment

    def _reserve(
        self, prompt: RoutedPrompt, chosen: Selection, now: float, computes: bool = True, decodes: bool = True
    ) -> Assignment:
        """Reserve a share of a worker that `computes` the prompt, or `decodes` the answer, or both."""
        choice, rank = chosen.decision.choice, chosen.rank
        worker, target, load = rank.worker, rank.target, rank.load
        uncached = 0
        if computes:
            uncached = max(prompt.tokens - choice.overlap, 1)
        seconds = 0.0
        if self.needs_prompts and computes:
            rates = self._learned.rates.learner(worker.url, target.model).rates
            seconds = prefill_seconds(rates, prompt.tokens, choice.overlap, choice.requests, choice.context)
        reservation = Reservation(
            load,
            uncached,
            prompt.tokens,
            seconds,
            streamed=prompt.streamed and computes and decodes,
            now=now,
        )
        work = load.pending
        if self._sharing.channels:
            work += self._sharing.peer_load.of(worker.url, target.dp_rank).pending
        attempt = worker.health.begin(work, target.dp_rank, prompt.streamed, one_of_many=rank.one_of_many, now=now)
        return Assignment(chosen, reservation, attempt)

    def record_in_flight(self, prompt: RoutedPrompt, assignment: Assignment, now: float | None = None) -> None:
        """Count the prompts of a reserved request as held soon, and watch what becomes of it.

        In the step of the choice, too: the next request is to know of it. Only the first call counts.
        """
        if assignment.held:
            return
        assignment.held = True
        if now is None:
            now = time.monotonic()
        prefill = assignment.prefill
        if prefill is not None:
            self._record_prompts(prompt, prefill, now, whole=False)
        self._record_prompts(prompt, assignment, now, whole=prefill is None)
        if now >= self._watch_from and self.watching is not None:
            assignment.seen = self.watching.placed(prompt, assignment)
            self._watch_from = self.watching.due

    def _record_prompts(self, prompt: RoutedPrompt, assignment: Assignment, now: float, whole: bool) -> None:
        """Count known prompts as held soon, and predict what the answer will tell of them. `whole`: it comes from the
        worker that computes them."""
        chosen = assignment.chosen
        choice, target, hashes = chosen.decision.choice, chosen.rank.target, chosen.hashes
        if not hashes:
            return
        if len(hashes) == 1:
            self._learned.pressure.routed(hashes[0], chosen.most)
        one_answer = len(prompt.token_ids) == prompt.answers == 1
        assignment.prediction = Prediction(
            target,
            hashes,
            prompt.tokens,
            choice.overlap,
            chosen.by_events if self._audit.events_complete(target) else None,
            one_answer and prompt.exact and whole,
            chosen.rank.worker.capacity_tokens,
            now,
            chosen.most,
        )
        for number, known in enumerate(hashes):
            # No event tells that a target holds what media stand in: that has to last.
            lasting = prompt.identities[number] is not prompt.token_ids[number]
            assignment.when_released(self._speculation.hold(target, known, lasting=lasting))
            if self._sharing.channels and (ended := self._sharing.sent(target, known)):
                assignment.when_released(ended)
        if prompt.streamed and one_answer and whole:
            assignment.timing = self._learned.timing(choice, prompt.tokens)

    def answered(self, assignment: Assignment, usage: Usage | None) -> None:
        """A worker answered a request in full; `usage` is what it says of the tokens."""
        if assignment.prediction is not None:
            self._audit.answered(assignment.prediction, usage)
        if assignment.seen:
            assignment.seen.answered(usage)
        if assignment.timing and usage:
            assignment.timing.end(usage.completion)

    def forget(self, worker: Worker) -> None:
        """A worker's cache was reset. Engines tell of it late, so what it held is forgotten at once."""
        for target in worker.targets:
            self._indexer.clear(target)
            self._speculation.forget(target)
            self._sharing.peer_load.forget_prompts(target)
            self._history.forget(target)

    def removed(self, worker: Worker) -> None:
        """A worker is gone: nothing of it is kept."""
        self._load.forget(worker.url)
        self._learned.rates.forget(worker.url)
        for target in worker.targets:
            self._speculation.forget(target)
            self._history.forget(target)
            self._audit.forget(target)

    def _scraped(self, worker: Worker) -> None:
        for dp_rank in worker.ranks():
            self._load.changed(worker.url, dp_rank)

    def others(self, prompt: RoutedPrompt, without: Collection[Worker], prefill: bool = False) -> bool:
        """Whether there is any other worker that could take a request now, or compute a prompt for others."""
        able = self._servers.of(prompt.name, prefill).workers
        return len(able) > len(without) or any(worker not in without for worker in able)

    def _options(
        self, prompt: RoutedPrompt, without: Collection[Worker], limits: Limits, now: float, prefill: bool = False
    ) -> CandidateSet:
        """Every target that could take a prompt now, with what it holds of it and has to do.

        `prefill`: those that only compute it, for others to go on.
        """
        serving = self._servers.of(prompt.name, prefill)
        options = CandidateSet(serving)
        eviction = self._learned.pressure.price()
        for served, ranks in self._able(serving, prompt, without, limits).items():
            salt = prompt.cache_salt
            root = served.root if salt is None else chunk_root(served.model, served.adapter, salt)
            hashes = options.hashes[served] = [chunk_hashes(root, identity) for identity in prompt.identities]
            candidates = self._loaded(ranks, now)
            if slowest := self._learned.rates.slowest_if_unlike(served.model, now):
                candidates = [self._rated(rank, candidates[place], slowest) for place, rank in enumerate(ranks)]
            if eviction:
                candidates = [self._evicting(candidate, eviction) for candidate in candidates]
            overlaps = self._overlaps(served, prompt, hashes, now)
            places = None if ranks is serving.of_served[served] else {rank: n for n, rank in enumerate(ranks)}
            for target, overlap in overlaps.items():
                rank = serving.of_target.get(target)
                if rank is None or rank.served is not served:
                    continue
                place = rank.place if places is None else places.get(rank, -1)
                if place >= 0:
                    candidates[place] = options.holding(candidates[place], overlap)
            options.candidates += candidates
        return options

    def _options_by_load(self, name: str | None, without: Collection[Worker], now: float) -> CandidateSet:
        """The same where nothing is asked of a prompt and nothing is limited."""
        serving = self._servers.of(name)
        options = CandidateSet(serving)
        if not without and serving.all_usable:
            options.candidates = self._loaded(serving.ranks, now)
        else:
            able = choosable(_but(serving.workers, without), self._random)
            options.candidates = self._loaded(serving.usable(able), now)
        return options

    def _loaded(self, ranks: list[RoutableRank], now: float) -> list[Candidate]:
        """Targets with what they have to do. They are shared with other requests, and not to be changed.

        A target is looked at again only when its load has changed, or what others have there; all of them now and then.
        """
        if now >= self._look_again_at:
            self._look_again_at = now + _LOOK_SECONDS
            self._servers.look_again()
        return [rank.candidate if rank.as_of == rank.load.changes else self._look_at(rank) for rank in ranks]

    def _look_at(self, rank: RoutableRank) -> Candidate:
        """A target with its load, in proportion to what its worker can bear.

        That is what this router and those it shares load with have there, and requests that none of them sent.
        """
        target, load = rank.target, rank.load
        peer_load = self._sharing.peer_load.of(target.worker, target.dp_rank)
        others = rank.worker.metrics.of(target.dp_rank)
        rank.candidate = candidate = Candidate(
            target,
            requests=load.requests + peer_load.requests + others.unseen,
            pending=load.pending + peer_load.pending,
            context=load.context + peer_load.context,
            waiting=len(load.prefills) + peer_load.waiting + others.waiting,
            kv_usage=others.kv_usage,
        )
        if (weight := rank.weight) != 1:
            candidate.requests = round(candidate.requests / weight)
            candidate.pending = round(candidate.pending / weight)
            candidate.context = round(candidate.context / weight)
        rank.as_of = load.changes
        return candidate

    def _rated(self, rank: RoutableRank, candidate: Candidate, slowest: Rates) -> Candidate:
        """A target with its rates."""
        target, rated = rank.target, candidate.copy()
        rated.rates = self._learned.rates.of(target.worker, target.model, slowest)
        rated.backlog = rank.load.backlog + self._sharing.peer_load.backlog(target.worker, target.dp_rank)
        return rated

    def _evicting(self, candidate: Candidate, price: float) -> Candidate:
        """A target with what its evictions cost, if it evicts."""
        if not self._learned.pressure.evicting(candidate.target):
            return candidate
        candidate = candidate.copy()
        candidate.eviction = price
        return candidate

    def has_capacity(self, worker: Worker, dp_rank: int, limits: Limits, tokens: int) -> bool:
        """Whether a rank may get one more request."""
        if limits.unlimited:
            return True
        load, weight = self._load.of(worker.url, dp_rank), worker.settings.weight
        shared = self._sharing.peer_load.of(worker.url, dp_rank)
        requests = load.requests + shared.requests + worker.metrics.of(dp_rank).unseen
        return limits.has_capacity(requests / weight, (load.context + shared.context) / weight, tokens)

    def _must_wait(self, rank: RoutableRank) -> bool:
        """Late binding's rule. It counts only prefills whose end will be seen."""
        peer_load = self._sharing.peer_load.of(rank.worker.url, rank.target.dp_rank)
        return must_wait((rank.load.streamed + peer_load.streamed) / rank.weight)

    def _overlaps(
        self, served: ServedModel, prompt: RoutedPrompt, hashes: list[array[int]], now: float
    ) -> dict[Target, Overlap]:
        """What targets hold of a request's prompts, or will hold once they have seen what is in flight to them.

        Targets with nothing of them are left out.
        """
        found: dict[Target, Overlap] = {}
        for number, known in enumerate(hashes):
            matches = self._matched(served, prompt.token_ids[number], prompt.cache_salt)
            own, others = self._speculation.overlaps(known, now), self._sharing.peer_load.overlaps(known)
            seen = self._history.overlaps(known)
            tokens = len(prompt.identities[number])
            for more in matches, others, seen:
                for target in more:
                    if target not in own:
                        own[target] = 0
            for target, in_flight in own.items():  # there may be thousands here too
                if others:
                    in_flight = max(in_flight, others.get(target, 0))
                if in_flight:
                    in_flight = self._full_blocks(target, in_flight, tokens)
                sent = self._full_blocks(target, seen[target], tokens) if target in seen else 0
                match = matches.get(target)
                held = match.matched_tokens if match is not None else 0
                told = held if held > in_flight else in_flight
                overlap = max(sent, in_flight if self._audit.distrusts(target) else told)
                total = found.get(target)
                if total is None:
                    total = found[target] = Overlap(overlap, told)
                else:
                    total.tokens += overlap
                    total.by_events += told
                if match is not None and overlap == held > in_flight:  # else it is being computed there
                    total.cpu += match.tiers[_CPU]
                    total.disk += match.tiers[_DISK] + match.tiers[_UNKNOWN]
        return found

    def _request(self, prompt: RoutedPrompt, options: CandidateSet) -> Request:
        """What the policy is told of a prompt. Without a session, those that begin alike are taken for one."""
        first = options.rank_of(options.candidates[0])
        hashes = options.hashes_for(first)
        beginning = hashes[0][min(len(hashes[0]), _SESSION_CHUNKS) - 1] if hashes and hashes[0] else None
        expected = self._learned.outputs.expected(first.served.model, prompt.max_tokens)
        return Request(prompt.tokens, expected * prompt.answers, prompt.session, beginning)

    def _able(
        self, serving: ModelTargets, prompt: RoutedPrompt, without: Collection[Worker], limits: Limits
    ) -> dict[ServedModel, list[RoutableRank]]:
        """The ranks that a request may go to now, by what they serve under its name.

        What goes on from a response goes to the worker that made it, as long as that one is there.
        """
        if not without and limits.unlimited and not prompt.previous_response and serving.all_usable:
            return serving.of_served
        workers = _but(serving.workers, without)
        owner = prompt.previous_response and self.responses.of(prompt.previous_response)
        owners = [each for each in workers if each.url == owner] if owner else []

        def has_capacity(worker: Worker) -> bool:
            return any(self.has_capacity(worker, dp_rank, limits, prompt.tokens) for dp_rank in worker.ranks())

        able: dict[ServedModel, list[RoutableRank]] = {}
        for rank in serving.usable(
            owners or choosable(workers, self._random, None if limits.unlimited else has_capacity)
        ):
            if limits.unlimited or self.has_capacity(rank.worker, rank.target.dp_rank, limits, prompt.tokens):
                able.setdefault(rank.served, []).append(rank)
        return able

    def _serving_now(self, name: str | None, without: Collection[Worker]) -> Sequence[Worker]:
        """The workers that answer and serve a name; any will do where it is None."""
        return _but(self._fleet.able(name), without)

    def _matched(self, served: ServedModel, token_ids: PackedPrompt, cache_salt: str | None) -> dict[Target, Match]:
        """What targets hold of a prompt, by the index."""
        try:
            return self._indexer.held(MatchQuery(served.model, token_ids, served.adapter, cache_salt))
        except UnknownModelError:
            return {}

    def _full_blocks(self, target: Target, shared: int, tokens: int) -> int:
        """What a target reuses of a prompt when it has seen so many tokens of it."""
        shared = min(shared, tokens - 1)
        return shared - shared % (self._indexer.block_size(target) or CHUNK_TOKENS)

    def _only_model(self) -> str | None:
        """The model, where the workers serve but one."""
        described = [worker.description for worker in self._fleet.workers if worker.description]
        models = {model.name for description in described for model in description.base_models()}
        return models.pop() if len(models) == 1 else None

    def _unknown_model(self, name: str) -> RequestError:
        known = sorted(self._fleet.names())
        if not known:
            return RequestError(
                "No worker has answered yet, so no model is known. Try again later.",
                status=503,
                type="service_unavailable",
                code="no_worker_available",
            )
        return RequestError(
            f"The model {name!r} does not exist. Send one of: {', '.join(known)}.",
            status=404,
            type="not_found_error",
            param="model",
            code="model_not_found",
        )


def _routed_by_load(request: RoutedRequest, body_bytes: int, error: Exception) -> RoutedPrompt:
    """A prompt that could not be tokenized. Whether it is none is for the worker to say."""
    log.debug("routed by load alone", model=request.model, reason=str(error))
    return unread_prompt(request, body_bytes)


_ADAPTER_OF_ENGINE: dict[Engine, type[Adapter]] = {Engine.SGLANG: Sglang, Engine.VLLM: Nixl}


def _but(workers: Sequence[Worker], without: Collection[Worker]) -> Sequence[Worker]:
    return [worker for worker in workers if worker not in without] if without else workers


def _unavailable(message: str) -> RequestError:
    return RequestError(
        f"{message} Try again later.", status=503, type="service_unavailable", code="no_worker_available"
    )
