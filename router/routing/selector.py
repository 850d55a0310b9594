"""The choice of a target for a request. It reserves nothing: `Placement` does that, in the same step.

    candidates     the targets that may receive the request, with their overlap and load   `candidates`
    policy         the target with the lowest cost                                         `router.policies`
    SLO            another target, if the choice would miss an SLO                         `SLOSelector`
    late binding   whether the request waits for its target in the router                  `late_binding`

Late binding's rule is here, because everything that it reads belongs to the choice: the load of the targets, the other
candidates, and the share of targets that prefill. Admission adds the number of requests that wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

from http_api.errors import RequestError
from router.apis.requests import RoutedRequest
from router.fleet.worker import Worker
from router.load.peer_load import PeerLoad
from router.policies import Candidate, Decision
from router.policies.rates import prefill_seconds
from router.prediction.learned import Learned
from router.prediction.slo import LITTLE, MISSED_SLO_COST, NO_SLO, SLO, Prediction, choose_for_slo, counts_in_prefill
from router.routing.assignment import Selection
from router.routing.candidates import CandidateFinder, CandidateSet
from router.routing.custom_choice import decide
from router.routing.disaggregation.adapters import Adapter
from router.routing.disaggregation.pair_rules import PairRules
from router.routing.disaggregation.selection import DisaggregatedSelector
from router.routing.late_binding import NO_TIME_TO_SPARE, is_sooner
from router.routing.ranks import NO_LIMITS, Limits, RoutableRank, TargetCapacity, is_prefill_busy, without
from router.routing.state import RoutingState
from router.routing.target_directory import TargetDirectory, unavailable, unknown_model
from router.settings import DisaggregationSettings, Role


class TargetSelector:
    """Chooses targets, predicts latencies, and answers what admission asks about capacity.

    - `pairs`: the rules which prefill and decode workers belong together.
    """

    def __init__(
        self,
        state: RoutingState,
        disaggregation: DisaggregationSettings,
        random: Random,
        slo_miss_cost: float = MISSED_SLO_COST,
    ) -> None:
        """Create a selector. `random` breaks ties, and picks the requests that try a half-open worker."""
        policy = state.policy.choose
        self._state = state
        self._fleet = state.fleet
        self._learned = state.learned
        self._clock = state.clock
        self._policy = policy
        self._custom = state.policy.custom
        self._directory = TargetDirectory(state.fleet, state.load, state.audit.caches)
        self._capacity = TargetCapacity(state.load, state.learned.outputs, state.running)
        self._candidates = CandidateFinder(state, self._directory, self._capacity, random)
        self.pairs = PairRules(disaggregation, state.fleet, random)
        self._disaggregated = DisaggregatedSelector(state, self._candidates, disaggregation, slo_miss_cost, self.pairs)
        self._slo_selector = SLOSelector(state.learned, state.sharing.peer_load, slo_miss_cost)

    # The choice

    def choose(
        self,
        prompt: RoutedRequest,
        excluded: Collection[Worker] = (),
        limits: Limits = NO_LIMITS,
        now: float | None = None,
        slo: SLO | None = None,
    ) -> Selection | None:
        """Return the selection for a request; None if every target is at its limits.

        Raises RequestError: 404 for a model that no worker serves, 503 if no worker is left.
        """
        by_load = not self._state.needs_prompts and (limits.unlimited or limits.computed)
        if now is None:
            now = self._clock()
        if not by_load and now >= self._learned.evictions_due:
            self._learned.read_evictions(self._state.indexer, now)
        if self._fleet.disaggregated and self.pairs.has_revisions:
            excluded = self._with_other_revisions(prompt, excluded)
        found = self._candidates.find(prompt, excluded, limits, now, by_load=by_load)
        if found.count:
            selection = None if self._fleet.disaggregated else found.cheapest(prompt.tokens)
            if selection is None:
                selection = self._by_records(prompt, excluded, found, now, slo, limits)
            if selection is None:
                return self._none_allowed(prompt, excluded, limits, now)
            if self._fleet.disaggregated:  # a choice of a pair has counted the SLO
                selection.slo = slo
            elif slo is not None:
                return self._slo_selector.select(found, selection, prompt, slo, now)
            elif self._learned.predictions.tracks_slos:
                return self._slo_selector.spare_others(found, selection, prompt, now)
            return selection
        if without(self._fleet.able(prompt.name), excluded):
            return None
        if prompt.name is not None and self._fleet.model_of(prompt.name) is None:
            raise unknown_model(self._fleet, prompt.name)
        raise unavailable(f"No worker {f'for model {prompt.name!r} ' if prompt.name else ''}can be reached.")

    def _with_other_revisions(self, prompt: RoutedRequest, excluded: Collection[Worker]) -> Collection[Worker]:
        """Return the excluded workers and those of other revisions than the one that is drawn for a request."""
        decodes, prefills = self._ready(prompt, excluded), self._ready(prompt, excluded, prefill=True)
        decoding = [worker for worker in decodes if worker.role is Role.DECODE]
        others = self.pairs.other_revisions(prompt, decoding, prefills)
        return [*excluded, *others] if others else excluded

    def _ready(self, prompt: RoutedRequest, excluded: Collection[Worker], prefill: bool = False) -> list[Worker]:
        """Return the workers of a role that may receive a request, without ejected ones if others exist."""
        left = [worker for worker in self._directory.of(prompt.name, prefill).workers if worker not in excluded]
        return [worker for worker in left if worker.health.circuit.closed or worker.trusted] or left

    def _by_records(
        self,
        prompt: RoutedRequest,
        excluded: Collection[Worker],
        found: CandidateSet,
        now: float,
        slo: SLO | None = None,
        limits: Limits = NO_LIMITS,
    ) -> Selection | None:
        """Return the policy's selection from records of all candidates; None if a policy of one's own excludes them.

        `slo`, `limits`: those that the choice of a pair counts.
        """
        request = self._candidates.request(prompt, found, now)
        if self._fleet.disaggregated:
            return self._disaggregated.select(prompt, excluded, found, request, now, slo, limits)
        decision = decide(self._custom, self._policy, found, prompt, request)
        return None if decision is None else found.select(decision)

    def _none_allowed(
        self, prompt: RoutedRequest, excluded: Collection[Worker], limits: Limits, now: float
    ) -> Selection | None:
        """Return None if a target at its limits is allowed, so that the request waits for it. Raises RequestError."""
        if any(worker not in excluded for worker in self._fleet.full()):
            return None
        if not limits.unlimited:
            found = self._candidates.find(prompt, excluded, NO_LIMITS, now)
            if found.count and self._by_records(prompt, excluded, found, now) is not None:
                return None
        raise unavailable("The policy allows no worker for this request.")

    # Predictions

    def predict(self, candidate: Candidate, prompt: RoutedRequest) -> Prediction:
        """Return the predicted TTFT and TPOT of a prompt that a candidate receives now."""
        rank = self._directory.of(prompt.name).of_target[candidate.target]
        return self._slo_selector.prediction(rank, candidate, prompt)

    def predict_on(self, rank: RoutableRank, candidate: Candidate, prompt: RoutedRequest) -> Prediction:
        """Return the predicted TTFT and TPOT of a prompt on a candidate whose rank is known."""
        return self._slo_selector.prediction(rank, candidate, prompt)

    def prefill_seconds(self, prompt: RoutedRequest) -> float:
        """Return the predicted duration of a prompt's prefill, and of its load, where the least is to compute."""
        try:
            selection = self.choose(prompt)
        except RequestError:
            selection = None
        if selection is None:
            return prefill_seconds(self._learned.rates.start, prompt.tokens, 0, 0, 0)
        best = min(selection.decision.candidates, key=lambda candidate: candidate.work(prompt.tokens))
        load = 0.0 if best.source is None else best.source.load_seconds
        target, reused = best.target, best.reused
        return load + self._learned.rates.prefill_seconds(
            target.worker, target.model, prompt.tokens, reused, best.requests, best.context
        )

    # Late binding

    def bind(
        self, prompt: RoutedRequest, selection: Selection, excluded: Collection[Worker], limits: Limits, waiting: int
    ) -> Selection | None:
        """Return the selection to send a request by; None if the request should wait for its target.

        An idle target's selection replaces it where the request is answered sooner. `waiting` requests are in the
        router.
        """
        computing = selection.prefill or selection
        if not self._is_busy(computing, limits, crowded=True):
            return selection
        if selection.prefill is not None and waiting > computing.decision.count and not limits.computed:
            return selection  # queues of prefill workers show in the cost, so that decode workers help
        sooner = self._sooner(prompt, selection, excluded, limits)
        if sooner is None and self._is_busy(computing, limits, crowded=waiting > computing.decision.count):
            return None
        return sooner or selection

    def _is_busy(self, selection: Selection, limits: Limits, crowded: bool) -> bool:
        """Return whether the selected target is busy with prefills, so that the request should wait.

        Without computed limits, a request waits only if it has another target to wait for.
        """
        may_wait = limits.computed or selection.decision.count > 1
        return may_wait and is_prefill_busy(selection.rank, crowded, limits)

    def _sooner(
        self, prompt: RoutedRequest, selection: Selection, excluded: Collection[Worker], limits: Limits
    ) -> Selection | None:
        """Return an idle target's selection that answers sooner; None to wait. An SLO keeps its own selection."""
        prefilling = self._directory.of(prompt.name).prefill_share.average
        if prefilling >= NO_TIME_TO_SPARE or selection.slo is not None or self._fleet.disaggregated:
            return None
        now = self._clock()
        found = self._candidates.find(prompt, excluded, limits, now)
        ranks = found.targets.ranks
        idle = found.without([row for row in found.view.prefilling if is_prefill_busy(ranks[row], True, limits)])
        if not idle.count:
            return None
        other = idle.cheapest(prompt.tokens) or self._by_records(prompt, excluded, idle, now)
        if other is None:
            return None
        if self._custom is not None and self._custom.added(other.decision) > self._custom.added(selection.decision):
            return None
        there, here = other.decision.chosen, selection.decision.chosen
        return other if is_sooner(there, here, prompt.tokens, prefilling) else None

    # Capacity

    def ranks(self, prompt: RoutedRequest, prefill: bool = False) -> list[RoutableRank]:
        """Return the targets of a request's name. `prefill`: those that only compute prompts."""
        return self._directory.of(prompt.name, prefill).ranks

    def at_limits(self, worker: Worker, dp_rank: int, limits: Limits) -> bool:
        """Return whether a DP rank may receive no further request, however short."""
        return self._capacity.at_limits(worker, dp_rank, limits)

    def any_has_capacity(
        self, prompt: RoutedRequest, excluded: Collection[Worker], limits: Limits, waiting: int | None = None
    ) -> bool:
        """Return whether any target may receive a request now, so that choosing again can help.

        `waiting`: the requests that wait in the router; None if late binding holds no requests.
        """
        ranks = [rank for rank in self._directory.of(prompt.name).ranks if rank.worker not in excluded]
        late_binding = waiting is not None and (len(ranks) > 1 or limits.computed)
        crowded = waiting is not None and waiting > len(ranks)
        demand = self._capacity.demand(prompt)
        free = [
            rank
            for rank in ranks
            if self._capacity.has_capacity(rank, limits, demand)
            and not (late_binding and is_prefill_busy(rank, crowded, limits))
        ]
        if not free or not limits.computed or not late_binding or not self._fleet.disaggregated:
            return bool(free)
        return self._may_prefill(prompt, excluded, free, waiting or 0, limits)

    def _may_prefill(
        self,
        prompt: RoutedRequest,
        excluded: Collection[Worker],
        free: Sequence[RoutableRank],
        waiting: int,
        limits: Limits,
    ) -> bool:
        """Return whether a prompt that one of the `free` ranks answers may be computed now.

        Late binding holds it while all prefill workers are busy, because they would compute it in their own order.
        """
        prefills = [rank for rank in self._directory.of(prompt.name, True).ranks if rank.worker not in excluded]
        if not prefills or any(rank.worker.role is not Role.DECODE for rank in free):
            return True
        crowded = waiting > len(prefills)
        return not all(is_prefill_busy(rank, crowded, limits) for rank in prefills)

    def waiting_per_target(self, prompt: RoutedRequest, excluded: Collection[Worker], waiting: int) -> float:
        """Return a number of waiting requests, divided by the number of targets of a request."""
        targets = self._directory.of(prompt.name)
        count = len(targets.ranks) - sum(len(targets.of_worker.get(worker, ())) for worker in excluded)
        return waiting / count if count > 0 else 0.0

    def is_held_for(self, rank: RoutableRank, limits: Limits) -> bool:
        """Return whether late binding holds requests for a rank if more requests wait than there are targets."""
        return is_prefill_busy(rank, True, limits)

    def prefill_has_time(self, prompt: RoutedRequest) -> bool:
        """Return whether the workers that only compute prompts have spare capacity."""
        return self._directory.of(prompt.name, True).prefill_share.average < NO_TIME_TO_SPARE

    def opens_at(self, prompt: RoutedRequest) -> float | None:
        """Return when the first of a request's paced targets may receive a prompt again; None if none is paced."""
        return self._capacity.opens_at(self._directory.of(prompt.name).ranks)

    def awaits_worker(self, prompt: RoutedRequest) -> bool:
        """Return whether a request may wait for the first worker of its model, or for the prefill worker it needs."""
        if prompt.name is None:
            return False
        if self._fleet.awaits(prompt.name):
            return True
        if not self._fleet.disaggregated or not self._fleet.awaits(prompt.name, prefill=True):
            return False
        return self._disaggregated.need_prefill(self._directory.of(prompt.name).workers, prompt)

    def has_others(self, prompt: RoutedRequest, excluded: Collection[Worker], prefill: bool = False) -> bool:
        """Return whether a worker is left that may receive a request, or only its prefill if `prefill` is true."""
        workers = self._directory.of(prompt.name, prefill).workers
        return len(workers) > len(excluded) or not set(workers) <= set(excluded)

    def fits_all(self, prompt: RoutedRequest) -> bool:
        """Return whether every worker of the prompt's name has its abilities, and holds the prompt and its answer."""
        targets = self._directory.of(prompt.name)
        return not targets.too_short(prompt.context, ()) and not targets.lacking(prompt.needs)

    def lacking(self, prompt: RoutedRequest) -> list[Worker]:
        """Return the workers of a prompt's name that lack an ability that it needs."""
        return self._directory.of(prompt.name).lacking(prompt.needs)

    def not_longer(self, prompt: RoutedRequest, worker: Worker) -> list[Worker]:
        """Return the workers whose context is not longer than a worker's; none if all have the same length."""
        return self._directory.of(prompt.name).shorter(worker)

    def adapter_of(self, worker: Worker) -> type[Adapter] | None:
        """Return the adapter that hands a prefill over to a decode worker; None if its engine has none."""
        return self._disaggregated.adapter_of(worker)

    # Events of the fleet

    def scraped(self, worker: Worker) -> None:
        """Read a worker's load again, because its metrics were read."""
        self._candidates.scraped(worker)

    def removed(self, worker: Worker) -> None:
        """Forget a worker that was removed."""
        self._candidates.removed(worker)
        self.pairs.forget(worker)


class SLOSelector:
    """Selects by predicted latencies. `slo_miss_cost`: in prefill tokens."""

    def __init__(self, learned: Learned, peer_load: PeerLoad, slo_miss_cost: float) -> None:
        self._predictions = learned.predictions
        self._outputs = learned.outputs
        self._turns = learned.turns
        self._peer_load = peer_load
        self._slo_miss_cost = slo_miss_cost

    def select(self, found: CandidateSet, usual: Selection, prompt: RoutedRequest, slo: SLO, now: float) -> Selection:
        """Return the selection for a request with an SLO. `usual`: the policy's selection without the SLO."""
        self._predictions.track_slos()
        selection, prediction = self._choose(found, usual, prompt, slo, now)
        selection.slo, selection.prediction = slo, prediction
        selection.slo_missed_by = prediction.slo_missed_by(slo, now, self._output(selection.rank, prompt))
        return selection

    def spare_others(self, found: CandidateSet, usual: Selection, prompt: RoutedRequest, now: float) -> Selection:
        """Return the selection for a request without an SLO: not `usual` if other requests would miss theirs by it."""
        if not self._predictions.has_tpot_objective(usual.rank.target) or not counts_in_prefill(usual.decision.unit):
            return usual
        return self._choose(found, usual, prompt, NO_SLO, now)[0]

    def _choose(
        self, found: CandidateSet, usual: Selection, prompt: RoutedRequest, slo: SLO, now: float
    ) -> tuple[Selection, Prediction]:
        prediction = self.prediction(usual.rank, usual.decision.chosen, prompt)
        if found.count <= 1 or prediction.loss(slo, now) <= LITTLE:
            return usual, prediction
        decision = usual.decision
        candidates = decision.candidates
        predictions = [self.prediction(found.rank_of(each), each, prompt) for each in candidates]
        turns = self._turns.expected(usual.rank.target.model)
        position = choose_for_slo(decision, predictions, slo, now, self._slo_miss_cost, turns)
        chosen = Decision(
            candidates[position], candidates, decision.terms, unit=decision.unit, excluded=decision.excluded
        )
        return found.select(chosen), predictions[position]

    def prediction(self, rank: RoutableRank, candidate: Candidate, prompt: RoutedRequest) -> Prediction:
        """Return the predicted latency of a prompt that a candidate receives now."""
        backlog = rank.load.backlog + self._peer_load.backlog(rank.target.worker, rank.target.dp_rank)
        # Media are encoded while earlier prefills are computed.
        backlog = max(backlog, prompt.encoding)
        return self._predictions.of(candidate, prompt.tokens, self._output(rank, prompt), backlog)

    def _output(self, rank: RoutableRank, prompt: RoutedRequest) -> float:
        return self._outputs.of_request(rank.served.model, prompt)
