"""The same fleet before a router that knows what requests are promised: it predicts by the rates that it learns, and
chooses by them, as `router.routing.slo_selection` and `router.admission` do; or as llm-d does.
"""

from __future__ import annotations

from bisect import insort
from enum import StrEnum
from random import Random

from router.admission.admission import LATE_TIMEOUTS, LATE_TRIES, TRIES
from router.cache_state.in_flight_prefixes import ReleaseCallback
from router.policies import Candidate, Decision, Policy
from router.policies.rates import Rates, prefill_seconds
from router.prediction.learned import Learned, RequestTiming
from router.prediction.predictions import WatchedAnswer
from router.prediction.slo import LITTLE, NO_SLO, SLO, Prediction, choose_for_slo
from router.routing.late_binding import held_order, slo_order
from router.settings import PolicySettings
from simulator.fleet.engine import Progress
from simulator.fleet.fleet import TIMEOUT, Fleet, HeldRequest, Outcome
from simulator.fleet.predicted_latency import predicted_latency
from simulator.fleet.profiles import Profile
from simulator.fleet.trace import TracedRequest

_LATE_TIMEOUT = LATE_TIMEOUTS * TIMEOUT
_BROKEN_PROMISE = PolicySettings().broken_promise


class By(StrEnum):
    """Who chooses: this project, or llm-d by the least or the most headroom."""

    BROKEN_PROMISES = "broken_promises"
    LEAST_HEADROOM = "least_headroom"
    MOST_HEADROOM = "most_headroom"


class PromisedFleet(Fleet):
    """One run of a trace whose requests are promised something. `watched`: every answer, with what was predicted."""

    def __init__(
        self, profile: Profile, workers: int, kv_tokens: int, policy: Policy, random: Random, by: By, late_binding: bool
    ) -> None:
        super().__init__(profile, workers, kv_tokens, policy, late_binding, random)
        self.watched: list[WatchedAnswer] = []
        self._by = by
        self._learned = Learned(Rates(), self._clock)
        self._learned.predictions.slo()
        self._numbers_of = {target: number for number, target in enumerate(self._targets)}
        self._slos: dict[int, SLO] = {}  # by the identity of the request
        self._missed: dict[int, bool] = {}  # by the identity of the SLO: the verdict of the last choice
        self._answers: dict[int, tuple[WatchedAnswer, RequestTiming, ReleaseCallback | None]] = {}

    def _place(self, outcome: Outcome) -> set[int]:
        request = outcome.request
        if (promised := request.promised) is not None:
            level, refuses = promised.service_level, promised.refuses_late
            self._slos[id(request)] = SLO(promised.ttft, promised.tpot, request.arrival, level, refuses)
        choice = self._choose(request)
        if self._refuses(request):
            return set()
        return self._bind_or_hold(outcome, choice)

    def _sooner(self, request: TracedRequest, choice: Candidate) -> Candidate | None:
        return None if id(request) in self._slos else super()._sooner(request, choice)

    def _hold(self, held: HeldRequest) -> None:
        insort(self._held, held)
        promised = held.outcome.request.promised
        self._later(max(TIMEOUT, (promised and promised.ttft) or 0.0), 0, held.outcome)

    def _time_over(self, held: HeldRequest) -> set[int]:
        request = held.outcome.request
        slo = self._slos.get(id(request))
        self._held.remove(held)
        choice = self._choose(request)
        if self._refuses(request):
            return set()
        late = slo is not None and slo.first_token_by is not None and self._missed.get(id(slo), False)
        ends = request.arrival + _LATE_TIMEOUT
        if late and self._now < ends and self._unless_held(request, choice) is None:
            insort(self._held, held._replace(order=self._order(request, choice)))
            self._later(ends - self._now, 0, held.outcome)
            return set()
        return {self._bind(held.outcome, choice)}

    def _retry(self) -> set[int]:
        bound = set[int]()
        late = []
        in_vain = 0  # of those that were late before
        for held in self._held[:TRIES]:
            request = held.outcome.request
            if all(self._is_busy(load) for load in self._loads):
                break
            slo = self._slos.get(id(request))
            was_late = slo is not None and self._missed.get(id(slo), False)
            if was_late and in_vain == LATE_TRIES:
                break
            choice = self._choose(request)
            placed = self._unless_held(request, choice)
            if self._refuses(request):
                self._held.remove(held)
            elif placed is not None:
                self._held.remove(held)
                bound.add(self._bind(held.outcome, placed))
            elif slo is not None and self._missed.get(id(slo), False):
                late.append((held, choice))
                in_vain += was_late
        for held, choice in late:
            self._held.remove(held)
            insort(self._held, held._replace(order=self._order(held.outcome.request, choice)))
        return bound

    def _refuses(self, request: TracedRequest) -> bool:
        """Whether a request is refused, since it would be late."""
        slo = self._slos.get(id(request))
        return slo is not None and self._missed.get(id(slo), False) and slo.refuses_late

    def _order(self, request: TracedRequest, choice: Candidate) -> float:
        slo = self._slos.get(id(request))
        if slo is None or slo.first_token_by is None:
            return super()._order(request, choice)
        if self._missed.get(id(slo), False):
            return held_order(self._now, self._prefill(request, choice)) + _LATE_TIMEOUT
        return slo_order(slo.first_token_by, self._prefill(request, choice))

    def _choose(self, request: TracedRequest) -> Candidate:
        decision = self._decide(request)
        slo = self._slos.get(id(request))
        if self._by is not By.BROKEN_PROMISES:
            predictions = [self._prediction(each, request) for each in decision.candidates]
            most = self._by is By.MOST_HEADROOM
            if slo is not None:
                self._missed[id(slo)] = all(each.slo_missed_by(slo, self._now, 1.0) > 0 for each in predictions)
            return predicted_latency(
                decision.candidates, predictions, slo, self._now, request.input_tokens, self._random, most
            )
        chosen, counted = decision.chosen, slo or NO_SLO
        if slo is None and not self._learned.predictions.promised_on(chosen.target):
            return chosen
        prediction = self._prediction(chosen, request)
        if prediction.loss(counted, self._now) > LITTLE:
            chosen, prediction = self._least_loss(decision, request, counted)
        if slo is not None:
            self._missed[id(slo)] = prediction.slo_missed_by(slo, self._now, self._output()) > 0
        return chosen

    def _least_loss(self, decision: Decision, request: TracedRequest, slo: SLO) -> tuple[Candidate, Prediction]:
        predictions = [self._prediction(each, request) for each in decision.candidates]
        turns = self._learned.turns.expected("m")
        place = choose_for_slo(decision, predictions, slo, self._now, _BROKEN_PROMISE, turns)
        return decision.candidates[place], predictions[place]

    def _prediction(self, candidate: Candidate, request: TracedRequest) -> Prediction:
        backlog = self._loads[self._numbers_of[candidate.target]].backlog
        return self._learned.predictions.of(candidate, request.input_tokens, self._output(), backlog)

    def _output(self) -> float:
        return self._learned.outputs.expected("m", None)

    def _prefill(self, request: TracedRequest, choice: Candidate) -> float:
        rates = self._learned.rates.learner(choice.target.worker, "m").rates
        return prefill_seconds(rates, request.input_tokens, choice.overlap, choice.requests, choice.context)

    def _bind(self, outcome: Outcome, choice: Candidate) -> int:
        request, target, predictions = outcome.request, choice.target, self._learned.predictions
        slo = self._slos.get(id(request))
        answer = predictions.watch(target, self._prediction(choice, request), slo, self._now)
        predictions.placed(target, self._prefill(request, choice), self._now)
        cached = max(self._view.overlaps(request.blocks).values(), default=0) * self._block_tokens
        self._learned.turns.seen("m", min(cached, request.input_tokens), request.input_tokens)
        release = predictions.hold(target, slo.tpot) if slo is not None and slo.tpot is not None else None
        self._answers[id(request)] = answer, self._learned.timing(choice, request.input_tokens), release
        self.watched.append(answer)
        return super()._bind(outcome, choice)

    def _progress(self, worker: int, progress: Progress) -> set[int]:
        for sequence in progress.begun:
            answer, timing, _ = self._answers[id(sequence.request)]
            answer.first_token(self._now)
            timing.first_byte()
        for sequence in progress.ended:
            answer, timing, release = self._answers.pop(id(sequence.request))
            answer.ended(sequence.request.output_tokens)
            timing.end(sequence.request.output_tokens)
            if release is not None:
                release()
        return super()._progress(worker, progress)
