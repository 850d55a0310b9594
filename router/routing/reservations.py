"""What a placed request holds until it ends: its share of a target's load, and its prompts as held there soon."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from indexer import Indexer
from router.apis.sessions import AgentHints
from router.apis.usage import Usage
from router.cache_state.hit_audit import Basis, CachePrediction, HitAudit
from router.cache_state.in_flight_prefixes import InFlightPrefixes, reusable_hashes
from router.cache_state.sent_prefixes import SentPrefixes
from router.fleet.fleet import Worker
from router.load.target_load import LoadTable, Reservation
from router.policies.rates import prefill_seconds
from router.policies.records import Candidate
from router.prediction.learned import Learned
from router.prediction.slo import Prediction
from router.routing.assignment import Assignment, RequestSampler
from router.routing.routable_rank import RoutableRank
from router.routing.routed_prompt import RoutedPrompt
from router.routing.selection import Selection
from router.sharing import LoadSharing

log = structlog.get_logger()


class Reservations:
    """Reserves, records what is in flight, and learns from answers. `sampler` sees some of the requests.

    `forecast`: what a candidate is predicted to take for a prompt.
    """

    def __init__(
        self,
        indexer: Indexer,
        load: LoadTable,
        in_flight_prefixes: InFlightPrefixes,
        learned: Learned,
        sent_prefixes: SentPrefixes,
        audit: HitAudit,
        sharing: LoadSharing,
        prediction: Callable[[RoutableRank, Candidate, RoutedPrompt], Prediction],
    ) -> None:
        self.sampler: RequestSampler | None = None
        self._indexer = indexer
        self._load = load
        self._in_flight_prefixes = in_flight_prefixes
        self._learned = learned
        self._sent_prefixes = sent_prefixes
        self._audit = audit
        self._sharing = sharing
        self._prediction = prediction
        self._predictions = learned.predictions
        self._sample_from = 0.0

    def reserve(self, prompt: RoutedPrompt, selection: Selection, now: float, needs_prompts: bool) -> Assignment:
        """Reserve a request's share of the load, in the same step as the selection; `record_in_flight` follows.

        `needs_prompts`: what the target holds of the prompt is known, so its prefill can be estimated.
        """
        if selection.disaggregation is None:
            return self._reserve(prompt, selection, now, needs_prompts)
        assignment = self._reserve(prompt, selection, now, needs_prompts, computes=selection.prefill is None)
        if selection.prefill is not None:
            assignment.prefill = self._reserve(prompt, selection.prefill, now, needs_prompts, decodes=False)
            assignment.attempt.waits_for_another()
        log.info(
            "disaggregation",
            decode=assignment.worker.url,
            prefill=assignment.prefill and assignment.prefill.worker.url,
            reason=selection.disaggregation.reason,
            **selection.disaggregation.inputs,
        )
        return assignment

    def _reserve(
        self,
        prompt: RoutedPrompt,
        selection: Selection,
        now: float,
        needs_prompts: bool,
        computes: bool = True,
        decodes: bool = True,
    ) -> Assignment:
        """Reserve a share of a worker that `computes` the prompt, or `decodes` the answer, or both."""
        chosen, rank = selection.decision.chosen, selection.rank
        worker, target, load = rank.worker, rank.target, rank.load
        uncached = 0
        if computes:
            uncached = max(prompt.tokens - chosen.overlap, 1)
        seconds = 0.0
        if needs_prompts and computes:
            rates = self._learned.rates.likely(worker.url, target.model)
            seconds = prefill_seconds(rates, prompt.tokens, chosen.overlap, chosen.requests, chosen.context)
        prediction = selection.prediction
        whole = prompt.streamed and computes and decodes
        if prediction is None and now >= self._predictions.due and whole and needs_prompts:
            prediction = self._prediction(rank, chosen, prompt)
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
        assignment = Assignment(selection, reservation, attempt)
        if self._predictions.promising:
            self._predictions.placed(target, seconds, now)
            self._learned.turns.seen(target.model, selection.best_overlap, prompt.tokens)
            slo = selection.slo
            if slo is not None and slo.tpot is not None and decodes:
                assignment.when_released(self._predictions.hold(target, slo.tpot))
        if prediction is not None and prompt.streamed and prompt.answers == 1 and len(prompt.identities) <= 1:
            assignment.watched = self._predictions.watch(target, prediction, selection.slo, now)
        return assignment

    def record_in_flight(self, prompt: RoutedPrompt, assignment: Assignment, now: float) -> None:
        """Count the prompts of a reserved request as held soon, and watch what becomes of it.

        Before the next selection, which is to know of it. Only the first call counts.
        """
        if assignment.recorded:
            return
        assignment.recorded = True
        prefill = assignment.prefill
        if prefill is not None:
            self._record_prompts(prompt, prefill, now, whole=False)
        self._record_prompts(prompt, assignment, now, whole=prefill is None)
        if prompt.hints is not None and prompt.session is not None:
            self._record_session(prompt, prompt.hints, prompt.session, assignment)
        if now >= self._sample_from and self.sampler is not None:
            assignment.sample = self.sampler.placed(prompt, assignment)
            self._sample_from = self.sampler.due

    def _record_session(self, prompt: RoutedPrompt, hints: AgentHints, session: str, assignment: Assignment) -> None:
        """Keep the place of a session that was said to go on, and let go of that of one that ends."""
        places, key = self._learned.places, (prompt.cache_salt, session)
        if hints.returns:
            assignment.when_released(places.keep(key, assignment.target, prompt.tokens, hints.next_call))
        else:
            places.leave(key)

    def _record_prompts(self, prompt: RoutedPrompt, assignment: Assignment, now: float, whole: bool) -> None:
        """Count known prompts as held soon, and predict what the answer will say of them. `whole`: the answer comes
        from the worker that computes them."""
        selection = assignment.selection
        chosen, target, hashes = selection.decision.chosen, selection.rank.target, selection.hashes
        if not hashes:
            return
        if len(hashes) == 1:
            self._learned.pressure.routed(hashes[0], selection.best_overlap)
        windowed = self._indexer.window(target) is not None
        if windowed:
            hashes = [reusable_hashes(chunks, len(prompt.identities[number])) for number, chunks in enumerate(hashes)]
        by_events = self._audit.basis(target) is Basis.EVENTS
        untold = prompt.by_text or selection.rank.served.replacement is not None
        one_answer = len(prompt.token_ids) == prompt.answers == 1
        assignment.cache_prediction = CachePrediction(
            target,
            hashes,
            prompt.tokens,
            chosen.overlap,
            selection.by_events if not untold and self._audit.events_complete(target) else None,
            one_answer and (prompt.exact or prompt.by_text) and whole,
            selection.rank.worker.capacity_tokens,
            now,
            selection.best_overlap,
            prompt.by_text,
            windowed,
            one_answer and bool(prompt.identities[0].media),
        )
        for number, chunks in enumerate(hashes):
            # No event says that a target holds what media stand in, a text, or a replaced adapter's: that has to last.
            lasting = by_events and (untold or prompt.identities[number] is not prompt.token_ids[number])
            assignment.when_released(self._in_flight_prefixes.hold(target, chunks, lasting=lasting))
            if self._sharing.channels and (on_release := self._sharing.sent(target, chunks)):
                assignment.when_released(on_release)
        if prompt.streamed and one_answer and whole:
            assignment.timing = self._learned.timing(chosen, prompt.tokens)

    def answered(self, assignment: Assignment, usage: Usage | None) -> None:
        """A worker answered a request in full; `usage` is what it says of the tokens."""
        if assignment.cache_prediction is not None:
            self._audit.answered(assignment.cache_prediction, usage)
        if assignment.sample:
            assignment.sample.answered(usage)
        if assignment.watched is not None:
            assignment.watched.ended(usage.completion if usage else 0)
        if assignment.timing and usage:
            assignment.timing.end(usage.completion)

    def forget_holdings(self, worker: Worker) -> None:
        """A worker's cache was reset. Its events say so late, so what it held is forgotten at once."""
        for target in worker.targets:
            self._indexer.clear(target)
        self.forget_sent(worker)

    def forget_sent(self, worker: Worker) -> None:
        """Nothing follows any more from what a worker was sent."""
        for target in worker.targets:
            self._in_flight_prefixes.forget(target)
            self._sharing.peer_load.forget_prompts(target)
            self._sent_prefixes.forget(target)
        self._learned.places.forget(worker.url)

    def removed(self, worker: Worker) -> None:
        """A worker is gone: nothing of it is kept."""
        self._load.forget(worker.url)
        self._learned.forget(worker.url)
        for target in worker.targets:
            self._in_flight_prefixes.forget(target)
            self._sent_prefixes.removed(target)
            self._audit.forget(target)
