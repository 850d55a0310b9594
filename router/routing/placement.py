"""The placement of a selected request: a share of its target's load, and its prompts as cached there soon.

- `reserve` reserves the share of the load, in the same step as the choice.
- `record_in_flight` counts the prompts as cached soon.
- `answered` learns from the engine's token counts.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import structlog

from router.apis.requests import RoutedRequest
from router.apis.usage import Usage
from router.cache_state.in_flight_prefixes import CHUNK_TOKENS, reusable_hashes
from router.cache_state.target_audit import Basis, CachePrediction
from router.fleet.health import Attempt
from router.fleet.worker import Worker
from router.load.target_load import ReservedLoad
from router.policies.rates import prefill_seconds
from router.prediction.learned import RequestTiming
from router.programs import Call
from router.routing.assignment import Assignment, Samples, Selection
from router.routing.pulls import PullResult, Pulls
from router.routing.selector import TargetSelector
from router.routing.state import RoutingState

log = structlog.get_logger()


class Placement:
    """Reserves load for selections, records prompts in flight, and learns from answers."""

    def __init__(self, state: RoutingState, selector: TargetSelector, samples: Samples | None = None) -> None:
        self._state = state
        self._selector = selector
        self._samples = samples
        self._clock = state.clock
        self._indexer = state.indexer
        self._in_flight_prefixes = state.in_flight_prefixes
        self._learned = state.learned
        self._predictions = state.learned.predictions
        self._audit = state.audit
        self._sharing = state.sharing
        self._running = state.running
        self._sessions = state.gate.sessions

    def place(self, prompt: RoutedRequest, excluded: Collection[Worker] = ()) -> Assignment:
        """Choose a target for a request, whatever the load, then reserve and record it. Raises RequestError (503)."""
        selection = self._selector.choose(prompt, excluded)
        assert selection is not None  # only limits make it None
        now = self._clock()
        assignment = self.reserve(prompt, selection, now)
        self.record_in_flight(prompt, assignment, now)
        return assignment

    def reserve(
        self, prompt: RoutedRequest, selection: Selection, now: float | None = None, call: Call | None = None
    ) -> Assignment:
        """Reserve a request's share of the load, in the step of the choice: with no await between them.

        `call`: its call of a session, if that is known.
        """
        if now is None:
            now = self._clock()
        assignment = self._reserve_pair(prompt, selection, now)
        if prompt.identity is not None and len(selection.hashes) == 1:
            self._charge_session(assignment, call or self._sessions.call_of(prompt, ""))
        return assignment

    def _reserve_pair(self, prompt: RoutedRequest, selection: Selection, now: float) -> Assignment:
        """Reserve a share of the worker of a selection, or of both workers of a pair."""
        if selection.disaggregation is None:
            return self._reserve(prompt, selection, now)
        assignment = self._reserve(prompt, selection, now, computes=selection.prefill is None)
        if selection.prefill is not None:
            assignment.prefill = prefill = self._reserve(prompt, selection.prefill, now, decodes=False)
            assignment.attempt.waits_for_another()
            adapter = self._selector.adapter_of(assignment.worker)
            if adapter is not None and not adapter.concurrent:
                moved = max(prompt.tokens - assignment.overlap, 0)
                decode = assignment.selection.rank
                assignment.transfer = self._state.transfers.watch(prefill.target, decode, moved, prompt.streamed)
        log.debug(
            "chose prefill and decode workers",
            decode=assignment.worker.url,
            prefill=assignment.prefill and assignment.prefill.worker.url,
            reason=selection.disaggregation.reason,
            **selection.disaggregation.inputs,
        )
        return assignment

    def _reserve(
        self,
        prompt: RoutedRequest,
        selection: Selection,
        now: float,
        computes: bool = True,
        decodes: bool = True,
    ) -> Assignment:
        """Reserve a share of a worker that `computes` the prompt, or `decodes` the answer, or both."""
        chosen, rank = selection.decision.chosen, selection.rank
        worker, target, load = rank.worker, rank.target, rank.load
        needs_prompts = self._state.needs_prompts
        uncached, seconds = 0, 0.0
        if computes:
            reused, tokens = selection.reused, prompt.tokens
            uncached = max(tokens - reused, 1)
            if needs_prompts or self._running is not None:
                seconds = prefill_seconds(rank.rates, tokens, reused, chosen.requests, chosen.context)
        output = 0.0
        if decodes and self._running is not None:
            output = self._learned.outputs.of_request(target.model, prompt)
        prediction = selection.prediction
        whole = prompt.streamed and computes and decodes
        if prediction is None and now >= self._predictions.due and whole and needs_prompts:
            prediction = self._selector.predict_on(rank, chosen, prompt)
        # A prefill worker answers when the prompt is computed, so the end of its prefill is always visible.
        visible = whole or not decodes
        source = chosen.source if computes else None
        reservation = ReservedLoad(
            load,
            uncached,
            prompt.tokens,
            seconds,
            streamed=visible,
            loads=source is not None,
            now=now,
            output=output,
        )
        work = load.pending
        if self._sharing.channels:
            work += load.peers.pending
        # The time of a prefill alone does not depend on the length of the answer.
        streamed = prompt.streamed or not decodes
        attempt = worker.health.begin(work, target.dp_rank, streamed, one_of_many=rank.one_of_many, now=now)
        attempt.most_tokens = prompt.max_tokens
        assignment = Assignment(selection, reservation, attempt)
        if self._state.sources is not None and source is not None:
            assignment.release_load = self._state.sources.loads.reserve(rank.cache, source)
            if source.peer is not None:
                assignment.pull = source
        if self._predictions.tracks_slos:
            self._predictions.placed(target, seconds, now)
            slo = selection.slo
            if decodes:
                self._learned.turns.seen(target.model, selection.best_overlap, prompt.tokens)
            if slo is not None and slo.tpot is not None and decodes:
                assignment.on_release.append(self._predictions.hold(target, slo.tpot))
        if prediction is not None and prompt.streamed and prompt.answers == 1 and len(prompt.identities) <= 1:
            assignment.watched = self._predictions.watch(target, prediction, selection.slo, now)
        return assignment

    def record_in_flight(self, prompt: RoutedRequest, assignment: Assignment, now: float | None = None) -> None:
        """Count a reserved request's prompts as cached soon, once, before the next choice reads them."""
        if assignment.recorded:
            return
        if now is None:
            now = self._clock()
        assignment.recorded = True
        prefill = assignment.prefill
        if prefill is not None:
            first = assignment.transfer is not None
            self._record_prompts(prompt, prefill, now, whole=False, decodes=False, first=first)
        self._record_prompts(prompt, assignment, now, whole=prefill is None)
        if self._samples is not None:
            if self._samples.noise is not None and prompt.identity is not None:
                self._samples.noise.sent(prompt, assignment.target.model)
            if now >= self._samples.due:
                self._samples.keep(prompt, assignment, now)

    def _charge_session(self, assignment: Assignment, call: Call | None) -> None:
        """Charge a request's session to its target, until the request ends. `call`: None for no session."""
        if call is not None:
            prefill = None if assignment.prefill is None else assignment.prefill.target
            self._state.gate.sent(call, assignment.target, assignment.selection.hashes[0], prefill)
            assignment.call = call
            assignment.on_release.append(partial(_end_call, call, assignment.attempt))

    def _record_prompts(
        self,
        prompt: RoutedRequest,
        assignment: Assignment,
        now: float,
        whole: bool,
        decodes: bool = True,
        first: bool = False,
    ) -> None:
        """Count known prompts as cached soon, and predict the cached tokens of the answer.

        - `whole`: the worker that computes the prompts also decodes the answer.
        - `decodes`: it decodes the answer, whichever worker computes the prompts.
        - `first`: it computes them for a decode worker, which receives the request later.
        """
        selection = assignment.selection
        chosen, target, hashes = selection.decision.chosen, selection.rank.target, selection.hashes
        if not hashes:
            return
        load = selection.rank.load
        caches = assignment.worker.metrics.caches_prefixes
        if self._running is not None and len(hashes) == 1 and caches and selection.rank.counts_shared:
            running = self._running.hold(load, target, hashes[0], assignment.reservation)
            assignment.on_release.append(running)
        if len(hashes) == 1 and decodes:
            source = chosen.source
            price = 0.0 if source is None else source.own_load / source.tokens
            single = target if whole else None
            self._learned.pressure.routed(hashes[0], selection.best_overlap, selection.reused, price, single)
        windowed, stream = self._indexer.window(target) is not None, self._indexer.stream(target)
        if windowed:
            hashes = [reusable_hashes(chunks, len(prompt.identities[number])) for number, chunks in enumerate(hashes)]
        basis, complete = self._audit.basis_and_completeness(selection.rank.cache, stream)
        without_events = prompt.by_text or selection.rank.served.replacement is not None
        one_answer = len(prompt.token_ids) == prompt.answers == 1
        pooled = target.worker in self._audit.pooled_workers
        if self._state.sources is not None and not pooled:
            pooled = self._state.sources.has_pool(target)
        assignment.cache_prediction = CachePrediction(
            hashes,
            prompt.tokens,
            assignment.overlap,
            selection.by_events if complete and not without_events else None,
            one_answer and (prompt.exact or prompt.by_text) and whole,
            selection.rank.capacity_tokens,
            now,
            selection.best_overlap,
            prompt.by_text,
            windowed,
            one_answer and bool(prompt.identities[0].media),
            loadable=assignment.loadable,
            pooled=pooled and not prompt.by_text,
        )
        for number, chunks in enumerate(hashes):
            # No event reports blocks with media, of texts, or of replaced adapters: these prefixes have to last.
            lasting = basis is Basis.EVENTS and (
                without_events or prompt.identities[number] is not prompt.token_ids[number]
            )
            assignment.on_release.append(self._in_flight_prefixes.hold(target, chunks, lasting=lasting))
            if self._sharing.channels:
                session = 0 if assignment.call is None else assignment.call.session.number
                if on_release := self._sharing.sent(target, chunks, session, prompt.tokens):
                    assignment.on_release.append(on_release)
        # A prefill worker that is sent its request first answers at the end of the prefill.
        if one_answer and (prompt.streamed if decodes else first):
            assignment.timing = self._learned.timing(
                chosen, prompt.tokens, assignment.reservation, self._sharing.peer_load, computes=whole or not decodes
            )

    def answered(self, assignment: Assignment, usage: Usage | None) -> None:
        """Learn from a complete answer, with the token counts that the worker reported, if it did."""
        if assignment.cache_prediction is not None:
            self._audit.answered(assignment.selection.rank.cache, assignment.cache_prediction, usage)
        if assignment.sample is not None:
            assignment.sample.usage = usage
        if assignment.watched is not None:
            assignment.watched.ended(usage.completion if usage else 0)
        if usage is not None:
            assignment.attempt.answered(usage.completion)
            if assignment.call is not None:
                assignment.call.output = usage.completion
        if assignment.timing and usage:
            assignment.timing.end(usage.completion)
            self._learn_load(assignment, assignment.timing, usage)
        if self._state.pulls is not None:
            self._judge_pull(self._state.pulls, assignment, usage)
            if assignment.prefill is not None:
                self._judge_pull(self._state.pulls, assignment.prefill, None)

    def _learn_load(self, assignment: Assignment, timing: RequestTiming, usage: Usage) -> None:
        """Learn the seconds of a load, if the answer confirms that it happened."""
        chosen = assignment.decision.chosen
        if self._state.sources is None or chosen.source is None or usage.cached is None:
            return
        if timing.loaded is not None and usage.cached >= chosen.reused:
            self._state.sources.rates.seen(chosen.source.name, chosen.source.tokens, *timing.loaded)

    def _judge_pull(self, pulls: Pulls, assignment: Assignment, usage: Usage | None) -> None:
        """Record whether a pull happened, if there was one. An engine may compute the last block of a hit again."""
        pull, prediction, result = assignment.pull, assignment.cache_prediction, PullResult.UNKNOWN
        if pull is None or pull.peer is None:
            return
        if prediction is not None and prediction.comparable and usage is not None:
            cached = self._audit.cached_in(assignment.selection.rank.cache, usage)
            if cached is not None:
                block = self._indexer.block_size(assignment.target) or CHUNK_TOKENS
                enough = assignment.decision.chosen.reused - block
                result = PullResult.PULLED if cached >= enough else PullResult.FAILED
        pulls.ended(assignment.target, pull.peer, pull.tokens, result)

    # Events of the fleet

    def forget(self, worker: Worker) -> None:
        """Forget everything that a worker holds, because its cache was reset. Its events report that only later."""
        for target in worker.targets:
            self._indexer.clear(target)
        self.replaced(worker)

    def replaced(self, worker: Worker) -> None:
        """Forget the prompts that a worker was sent, because it serves another model under a name."""
        for target in worker.targets:
            self._in_flight_prefixes.forget(target)
            self._sharing.peer_load.forget_prompts(target)
            self._audit.forget_sent(target)
        self._audit.remove(worker.url, kept=worker.targets)
        self._state.gate.sessions.forget(worker.targets)

    def restarted(self, worker: Worker) -> None:
        """Forget what a worker was sent, because it has a new process. Its requests in flight count."""
        for target in worker.targets:
            self._in_flight_prefixes.forget_ended(target)
            self._audit.forget_sent(target)
        self._state.gate.sessions.forget(worker.targets)

    def removed(self, worker: Worker) -> None:
        """Forget a worker that was removed."""
        self._state.load.forget(worker.url)
        self._state.transfers.forget(worker.url)
        self._state.gate.sessions.forget(worker.targets)
        self._learned.forget(worker.url)
        for target in worker.targets:
            self._in_flight_prefixes.forget(target)
        self._audit.remove(worker.url)


def _end_call(call: Call, attempt: Attempt, failed: bool) -> None:
    """End a call of a session. Without a first byte, its prompt was not computed."""
    call(failed or attempt.waits)
