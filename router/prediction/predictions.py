"""Predictions of TTFT and TPOT: what the learned rates say, put right by how far such predictions were off before.

The last ratios of what came to what the rates said are kept for each worker and model, apart for short, middling and
long times, since what is short is off by more. Where a worker has too few, those of all workers of the model count.

    TTFT = prefills that wait there + this one's own
    TPOT = step / (1 - share of the last seconds in which the worker computed prompts)

Every promised answer is watched, and of the others a few a second. What is promised on a target, and the share, are
kept from the first promise on: without any this costs nothing.
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
    broken_by,
    step_by_rates,
    tpot_by_rates,
    ttft_by_rates,
)

_ENOUGH: Final = 16
# Seconds by the rates at which the next kind of ratios begins.
_KINDS: Final[tuple[float, ...]] = (0.1, 1.0)
# Between answers without a promise that are watched, in seconds.
_SELDOM: Final = 0.05
_LEAST_SECONDS: Final = 1e-6
# Over which the share of prefills is averaged: about what an answer takes.
_HORIZON: Final = 10.0


class _Errors:
    """How far off predictions of one time, TTFT or TPOT, were: by model and kind, and by worker as well."""

    def __init__(self) -> None:
        self._of_model: dict[tuple[str, int], Ratios] = {}
        self._of_worker: dict[tuple[str, str, int], Ratios] = {}

    def add(self, target: Target, predicted: float, seconds: float) -> None:
        """What came, after what the rates said."""
        ratio, kind = seconds / predicted, bisect_right(_KINDS, predicted)
        self._of_model.setdefault((target.model, kind), Ratios()).add(ratio)
        self._of_worker.setdefault((target.worker, target.model, kind), Ratios()).add(ratio)

    def estimate(self, target: Target, predicted: float) -> Estimate:
        """What is to be expected, after what the rates say."""
        predicted = max(predicted, _LEAST_SECONDS)
        kind = bisect_right(_KINDS, predicted)
        ratios = self._of_worker.get((target.worker, target.model, kind))
        if ratios is None or len(ratios) < _ENOUGH:
            ratios = self._of_model.get((target.model, kind))
            if ratios is not None and len(ratios) < _ENOUGH:
                ratios = None
        return Estimate(predicted, ratios)

    def forget(self, worker: str) -> None:
        """A worker was removed."""
        for known in [known for known in self._of_worker if known[0] == worker]:
            del self._of_worker[known]


class _Busy:
    """What a target does: the prefills it got, in seconds that fade, and the times per token promised there."""

    __slots__ = ("at", "prefills", "promised")

    def __init__(self) -> None:
        self.prefills = 0.0
        self.at = 0.0
        self.promised: dict[float, int] = {}

    def prefill_share(self, now: float) -> float:
        """The share of the time in which it computes prompts."""
        return self.prefills * exp((self.at - now) / _HORIZON) / _HORIZON

    def add(self, seconds: float, now: float) -> None:
        """It got a prefill."""
        self.prefills = self.prefills * exp((self.at - now) / _HORIZON) + seconds
        self.at = now


class Predictions:
    """Predicts, and learns from what comes.

    `cpu_token`, `disk_token`: what loading a cached token takes, as a share of computing it. `due`: from when on the
    next answer without a promise is watched. `promising`: whether anything was ever promised. `on_first_token` and
    `on_answered` are called with each watched answer as it begins and ends.
    """

    def __init__(
        self,
        rates: RateTable,
        cpu_token: float = 0.0,
        disk_token: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.due = 0.0
        self.promising = False
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
        """What a candidate would take for a prompt of `tokens` whose answer is expected to have `output_tokens`.

        `backlog`: seconds until the prefills that it has are done.
        """
        target = candidate.target
        rates = self._rates.likely(target.worker, target.model)
        transfer = self._cpu_token * candidate.cpu + self._disk_token * candidate.disk
        ttft = self._ttft.estimate(target, ttft_by_rates(candidate, rates, tokens, backlog, transfer))
        step = step_by_rates(candidate, rates, tokens, output_tokens)
        if not self.promising:
            return Prediction(ttft, self._tpot.estimate(target, step))
        busy = self._busy.get(target)
        share = 0.0 if busy is None else busy.prefill_share(self.clock())
        own = prefill_seconds(rates, tokens, candidate.overlap, candidate.requests, candidate.context) / _HORIZON
        tpot = self._tpot.estimate(target, tpot_by_rates(step, share + own))
        promised = {} if busy is None else busy.promised
        unpromised = max(candidate.requests - sum(promised.values()), 0)
        if not promised and not unpromised:
            return Prediction(ttft, tpot)
        # By its prompt alone: wherever it goes its answer is decoded.
        others_step = max(step_by_rates(candidate, rates, 0, 0.0), _LEAST_SECONDS)
        off = 1.0 if tpot.ratios is None else tpot.ratios.at(0.5)
        before, after = (off * tpot_by_rates(others_step, each) for each in (share, share + own))
        return Prediction(ttft, tpot, broken_by(promised, unpromised, before, after))

    def slo(self) -> None:
        """Something is promised: from now on it is kept what targets do. What is known of times per token was learned
        without that."""
        if not self.promising:
            self.promising = True
            self._tpot = _Errors()

    def promised_on(self, target: Target) -> bool:
        """Whether any answer of a target was promised a time per token."""
        busy = self._busy.get(target)
        return busy is not None and bool(busy.promised)

    def placed(self, target: Target, seconds: float, now: float) -> None:
        """A target got a prefill that takes so long."""
        busy = self._busy.get(target)
        if busy is None:
            busy = self._busy[target] = _Busy()
        busy.add(seconds, now)

    def hold(self, target: Target, tpot: float) -> ReleaseCallback:
        """A time per token is promised on a target, until what is returned is called."""
        promised = self._busy.setdefault(target, _Busy()).promised
        promised[tpot] = promised.get(tpot, 0) + 1

        def end(failed: bool = False) -> None:  # noqa: ARG001
            promised[tpot] -= 1
            if not promised[tpot]:
                del promised[tpot]

        return end

    def watch(self, target: Target, prediction: Prediction, slo: SLO | None, sent: float) -> WatchedAnswer:
        """Watch a streamed answer to a request that is sent now."""
        self.due = max(self.due, sent + _SELDOM)
        return WatchedAnswer(self, target, prediction, slo, sent)

    def first_token(self, answer: WatchedAnswer, seconds: float) -> None:
        """A watched answer began, so long after it was sent."""
        self._ttft.add(answer.target, answer.prediction.ttft.by_rates, seconds)
        for on_first_token in self.on_first_token:
            on_first_token(answer)

    def answered(self, answer: WatchedAnswer, tpot: float | None) -> None:
        """A watched answer ended. `tpot`: seconds for each token after the first; None where it has no other."""
        if tpot is not None:
            self._tpot.add(answer.target, answer.prediction.tpot.by_rates, tpot)
        for on_answered in self.on_answered:
            on_answered(answer)

    def forget(self, worker: str) -> None:
        """A worker was removed."""
        self._ttft.forget(worker)
        self._tpot.forget(worker)
        for target in [target for target in self._busy if target.worker == worker]:
            del self._busy[target]


class WatchedAnswer:
    """One streamed answer and what was predicted of it.

    `predicted_ttft`, `predicted_tpot`: the bands as they were then. `sent`, `begun`: by the clock. `ttft` from its
    sending on, and `tpot`: None until they are known.
    """

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
        """It began. Only the first call counts. `now`: the time by the clock, where it was just read."""
        if self.ttft is None:
            self.begun = self._predictions.clock() if now is None else now
            self.ttft = self.begun - self.sent
            self._predictions.first_token(self, self.ttft)

    def ended(self, output_tokens: int) -> None:
        """It is complete, with so many tokens; 0: that is not known."""
        if self.ttft is not None:
            if output_tokens > 1:
                self.tpot = (self._predictions.clock() - self.begun) / (output_tokens - 1)
            self._predictions.answered(self, self.tpot)

    @property
    def kept(self) -> bool:
        """Whether what was promised was kept, as far as it is known. There is a promise."""
        slo = self.slo
        assert slo is not None
        in_time = slo.first_token_by is None or (self.ttft is not None and self.begun <= slo.first_token_by)
        return in_time and (slo.tpot is None or self.tpot is None or self.tpot <= slo.tpot)
