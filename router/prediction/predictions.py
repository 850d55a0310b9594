"""Predictions of TTFT and TPOT: the times by the learned rates, corrected by the errors of earlier predictions.

The last ratios of measured to predicted times are kept for each worker and model. Short, medium and long times have
separate ratios, because short times have larger errors. A worker with too few ratios uses those of its model.

    TTFT = waiting prefills + the prompt's own
    TPOT = step / (1 - share of the last seconds in which the worker computed prompts)

Every answer with an SLO is watched, and a few others a second. The objectives on each target, and its share of
prefills, are kept from the first SLO on. Without SLOs they cost nothing.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable
from math import exp
from typing import Final

from indexer import Target
from router.cache_state.in_flight_prefixes import ReleaseCallback
from router.policies.rates import RateTable, prefill_seconds
from router.policies.records import Candidate
from router.prediction.slo import (
    SLO,
    Estimate,
    Prediction,
    Ratios,
    expected_misses,
    step_by_rates,
    tpot_by_rates,
    ttft_by_rates,
)

_ENOUGH: Final = 16
# The predicted seconds at which medium and long times begin.
_KINDS: Final[tuple[float, ...]] = (0.1, 1.0)
# The least seconds between two watched answers without an SLO.
_SELDOM: Final = 0.05
_LEAST_SECONDS: Final = 1e-6
# Seconds over which the share of prefills is averaged: about the duration of an answer.
_HORIZON: Final = 10.0


class _Errors:
    """The errors of earlier predictions of TTFT or TPOT, by model and length, and by worker as well."""

    def __init__(self) -> None:
        self._of_model: dict[tuple[str, int], Ratios] = {}
        self._of_worker: dict[tuple[str, str, int], Ratios] = {}

    def add(self, target: Target, predicted: float, seconds: float) -> None:
        """Add a measured time. `predicted`: the time by the rates."""
        ratio, kind = seconds / predicted, bisect_right(_KINDS, predicted)
        self._of_model.setdefault((target.model, kind), Ratios()).add(ratio)
        self._of_worker.setdefault((target.worker, target.model, kind), Ratios()).add(ratio)

    def estimate(self, target: Target, predicted: float) -> Estimate:
        """Return the corrected estimate of a time. `predicted`: the time by the rates."""
        predicted = max(predicted, _LEAST_SECONDS)
        kind = bisect_right(_KINDS, predicted)
        ratios = self._of_worker.get((target.worker, target.model, kind))
        if ratios is None or len(ratios) < _ENOUGH:
            ratios = self._of_model.get((target.model, kind))
            if ratios is not None and len(ratios) < _ENOUGH:
                ratios = None
        return Estimate(predicted, ratios)

    def forget(self, worker: str) -> None:
        """Forget a worker that was removed."""
        for known in [known for known in self._of_worker if known[0] == worker]:
            del self._of_worker[known]


class _Busy:
    """The work of a target: its recent prefills in seconds, and the number of answers by TPOT objective."""

    __slots__ = ("at", "objectives", "prefills")

    def __init__(self) -> None:
        self.prefills = 0.0
        self.at = 0.0
        self.objectives: dict[float, int] = {}

    def prefill_share(self, now: float) -> float:
        """Return the share of the time in which it computes prompts."""
        return self.prefills * exp((self.at - now) / _HORIZON) / _HORIZON

    def add(self, seconds: float, now: float) -> None:
        """Add a prefill."""
        self.prefills = self.prefills * exp((self.at - now) / _HORIZON) + seconds
        self.at = now


class Predictions:
    """Predicts latencies, and learns from watched answers.

    - `due`: the time from which the next answer without an SLO is watched.
    """

    def __init__(
        self,
        rates: RateTable,
        cpu_token: float = 0.0,
        disk_token: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.due = 0.0
        self.tracks_slos = False
        self.clock = clock
        self.on_first_token: list[Callable[[WatchedAnswer], None]] = []
        self.on_answered: list[Callable[[WatchedAnswer], None]] = []
        self._rates = rates
        self._cpu_token = cpu_token
        self._disk_token = disk_token
        self._ttft = _Errors()
        self._tpot = _Errors()
        self._busy: dict[Target, _Busy] = {}

    def of(self, candidate: Candidate, tokens: int, output_tokens: float, backlog: float) -> Prediction:
        """Return the predicted latency of a prompt. `backlog`: the seconds until the candidate's prefills are done."""
        target = candidate.target
        rates = self._rates.likely(target.worker, target.model)
        transfer = self._cpu_token * candidate.cpu + self._disk_token * candidate.disk
        ttft = self._ttft.estimate(target, ttft_by_rates(candidate, rates, tokens, backlog, transfer))
        step = step_by_rates(candidate, rates, tokens, output_tokens)
        if not self.tracks_slos:
            return Prediction(ttft, self._tpot.estimate(target, step))
        busy = self._busy.get(target)
        share = 0.0 if busy is None else busy.prefill_share(self.clock())
        own = prefill_seconds(rates, tokens, candidate.reused, candidate.requests, candidate.context) / _HORIZON
        tpot = self._tpot.estimate(target, tpot_by_rates(step, share + own))
        objectives = {} if busy is None else busy.objectives
        without_objective = max(candidate.requests - sum(objectives.values()), 0)
        if not objectives and not without_objective:
            return Prediction(ttft, tpot)
        # Only the prompt makes the difference, because the answer is decoded on any candidate.
        others_step = max(step_by_rates(candidate, rates, 0, 0.0), _LEAST_SECONDS)
        correction = 1.0 if tpot.ratios is None else tpot.ratios.at(0.5)
        before, after = (correction * tpot_by_rates(others_step, each) for each in (share, share + own))
        return Prediction(ttft, tpot, expected_misses(objectives, without_objective, before, after))

    def of_pair(
        self, prefill: Candidate, decode: Candidate, tokens: int, output_tokens: float, backlog: float, after: float
    ) -> Prediction:
        """Return the predicted latency of a prompt that one worker computes, and another answers.

        - `backlog`: the seconds until the prefills of `prefill` are done.
        - `after`: the seconds from the end of the prefill to the first token: the transfer, and a step of decoding.
        """
        sender, receiver = prefill.target, decode.target
        transfer = self._cpu_token * prefill.cpu + self._disk_token * prefill.disk
        computing = self._rates.likely(sender.worker, sender.model)
        ttft = after + ttft_by_rates(prefill, computing, tokens, backlog, transfer)
        step = step_by_rates(decode, self._rates.likely(receiver.worker, receiver.model), tokens, output_tokens)
        if self.tracks_slos and (busy := self._busy.get(receiver)) is not None:
            step = tpot_by_rates(step, busy.prefill_share(self.clock()))
        return Prediction(self._ttft.estimate(receiver, ttft), self._tpot.estimate(receiver, step))

    def track_slos(self) -> None:
        """Begin to keep the work of targets, because a request has an SLO. TPOT errors start again from there."""
        if not self.tracks_slos:
            self.tracks_slos = True
            self._tpot = _Errors()

    def has_tpot_objective(self, target: Target) -> bool:
        """Return whether any answer on a target has a TPOT objective."""
        busy = self._busy.get(target)
        return busy is not None and bool(busy.objectives)

    def placed(self, target: Target, seconds: float, now: float) -> None:
        """Add a prefill of `seconds` seconds to a target."""
        busy = self._busy.get(target)
        if busy is None:
            busy = self._busy[target] = _Busy()
        busy.add(seconds, now)

    def hold(self, target: Target, tpot: float) -> ReleaseCallback:
        """Count a TPOT objective on a target. Returns the callback that ends it."""
        objectives = self._busy.setdefault(target, _Busy()).objectives
        objectives[tpot] = objectives.get(tpot, 0) + 1

        def end(failed: bool = False) -> None:  # noqa: ARG001
            objectives[tpot] -= 1
            if not objectives[tpot]:
                del objectives[tpot]

        return end

    def watch(self, target: Target, prediction: Prediction, slo: SLO | None, sent: float) -> WatchedAnswer:
        """Return the watch of a streamed answer to a request that is sent now."""
        self.due = max(self.due, sent + _SELDOM)
        return WatchedAnswer(self, target, prediction, slo, sent)

    def first_token(self, answer: WatchedAnswer, seconds: float) -> None:
        """Learn from a watched answer that began `seconds` seconds after it was sent."""
        self._ttft.add(answer.target, answer.prediction.ttft.by_rates, seconds)
        for on_first_token in self.on_first_token:
            on_first_token(answer)

    def answered(self, answer: WatchedAnswer, tpot: float | None) -> None:
        """Learn from a complete watched answer. `tpot`: its seconds per token; None if it has only one token."""
        if tpot is not None:
            self._tpot.add(answer.target, answer.prediction.tpot.by_rates, tpot)
        for on_answered in self.on_answered:
            on_answered(answer)

    def forget(self, worker: str) -> None:
        """Forget a worker that was removed."""
        self._ttft.forget(worker)
        self._tpot.forget(worker)
        for target in [target for target in self._busy if target.worker == worker]:
            del self._busy[target]


class WatchedAnswer:
    """A streamed answer, its predicted percentiles, and the measured times once they are known."""

    __slots__ = (
        "_predictions",
        "begun",
        "predicted_tpot",
        "predicted_ttft",
        "prediction",
        "sent",
        "slo",
        "target",
        "tpot",
        "ttft",
    )

    def __init__(
        self, predictions: Predictions, target: Target, prediction: Prediction, slo: SLO | None, sent: float
    ) -> None:
        self._predictions = predictions
        self.target = target
        self.prediction = prediction
        self.predicted_ttft = prediction.ttft.band
        self.predicted_tpot = prediction.tpot.band
        self.slo = slo
        self.sent = sent
        self.begun = 0.0
        self.ttft: float | None = None
        self.tpot: float | None = None

    def first_token(self, now: float | None) -> None:
        """Record the first token. Only the first call counts. `now`: the clock's time, if it was just read."""
        if self.ttft is None:
            self.begun = self._predictions.clock() if now is None else now
            self.ttft = self.begun - self.sent
            self._predictions.first_token(self, self.ttft)

    def ended(self, output_tokens: int) -> None:
        """Record the end of the answer. `output_tokens`: its tokens; 0 if they are not known."""
        if self.ttft is not None:
            if output_tokens > 1:
                self.tpot = (self._predictions.clock() - self.begun) / (output_tokens - 1)
            self._predictions.answered(self, self.tpot)

    @property
    def slo_met(self) -> bool:
        """True if the SLO was met, as far as it is known. The answer needs an SLO."""
        slo = self.slo
        assert slo is not None
        in_time = slo.first_token_by is None or (self.ttft is not None and self.begun <= slo.first_token_by)
        return in_time and (slo.tpot is None or self.tpot is None or self.tpot <= slo.tpot)
