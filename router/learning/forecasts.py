"""Predictions of TTFT and TPOT: what the learned rates say, put right by how far such predictions were off before.

The last `_KEPT` ratios of what came to what the rates said are kept for each worker and model, apart for short,
middling and long times, since what is short is off by more. Their median corrects the prediction, the outer tenths are
its band. Where a worker has too few, those of all workers of the model count.

Every promised answer is watched, and of the others a few a second.
"""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable
from typing import Final

from indexer import Target
from router.policies.promises import Band, Forecast, Promise, tpot_by_rates, ttft_by_rates
from router.policies.rates import RateTable
from router.policies.records import Candidate

_KEPT: Final = 128
_ENOUGH: Final = 16
# Seconds by the rates at which the next kind of ratios begins.
_KINDS: Final = (0.1, 1.0)
_LOW: Final = 0.1
_HIGH: Final = 0.9
# Between answers without a promise that are watched, in seconds.
_SELDOM: Final = 0.05
_LEAST_SECONDS: Final = 1e-6


class Ratios:
    """The last ratios of what came to what was predicted."""

    __slots__ = ("_latest", "_ordered")

    def __init__(self) -> None:
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._ordered)

    def add(self, ratio: float) -> None:
        """One more; the oldest is forgotten."""
        if len(self._latest) >= _KEPT:
            oldest = self._latest.popleft()
            del self._ordered[bisect_right(self._ordered, oldest) - 1]
        self._latest.append(ratio)
        insort(self._ordered, ratio)

    def below(self, share: float) -> float:
        """The ratio below which this share of them lies. There is one, at least."""
        return self._ordered[int(share * (len(self._ordered) - 1) + 0.5)]


class _Errors:
    """How far off predictions of one time, TTFT or TPOT, were: by model and kind, and by worker as well."""

    def __init__(self) -> None:
        self._of_model: dict[tuple[str, int], Ratios] = {}
        self._of_worker: dict[tuple[str, str, int], Ratios] = {}

    def add(self, worker: str, model: str, predicted: float, seconds: float) -> None:
        """What came, after what the rates said."""
        predicted = max(predicted, _LEAST_SECONDS)
        ratio, kind = seconds / predicted, bisect_right(_KINDS, predicted)
        self._of_model.setdefault((model, kind), Ratios()).add(ratio)
        self._of_worker.setdefault((worker, model, kind), Ratios()).add(ratio)

    def band(self, worker: str, model: str, predicted: float) -> Band | None:
        """The band of a prediction; None while too little is known."""
        kind = bisect_right(_KINDS, predicted)
        ratios = self._of_worker.get((worker, model, kind))
        if ratios is None or len(ratios) < _ENOUGH:
            ratios = self._of_model.get((model, kind))
            if ratios is None or len(ratios) < _ENOUGH:
                return None
        low, middle, high = ratios.below(_LOW), ratios.below(0.5), ratios.below(_HIGH)
        return Band(predicted * low, predicted * middle, predicted * high)

    def forget(self, worker: str) -> None:
        """A worker was removed."""
        for known in [known for known in self._of_worker if known[0] == worker]:
            del self._of_worker[known]


class Forecasts:
    """Predicts, and learns from what comes.

    `cpu_token`, `disk_token`: what loading a cached token takes, as a share of computing it. `on_first_token` and
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
        self.clock = clock
        self.on_first_token: list[Callable[[WatchedAnswer], None]] = []
        self.on_answered: list[Callable[[WatchedAnswer], None]] = []
        self._rates = rates
        self._cpu_token = cpu_token
        self._disk_token = disk_token
        self._ttft = _Errors()
        self._tpot = _Errors()

    def of(self, candidate: Candidate, tokens: int, output_tokens: float, backlog: float) -> Forecast:
        """What a candidate would take for a prompt of `tokens` whose answer is expected to have `output_tokens`.

        `backlog`: seconds until the prefills that it has are done.
        """
        target = candidate.target
        rates = self._rates.learner(target.worker, target.model).rates
        transfer = self._cpu_token * candidate.cpu + self._disk_token * candidate.disk
        ttft = ttft_by_rates(candidate, rates, tokens, backlog, transfer)
        tpot = tpot_by_rates(candidate, rates, tokens, output_tokens)
        ttft_band = self._ttft.band(target.worker, target.model, ttft)
        tpot_band = self._tpot.band(target.worker, target.model, tpot)
        return Forecast(
            ttft,
            tpot,
            ttft_band or Band(ttft, ttft, ttft),
            tpot_band or Band(tpot, tpot, tpot),
            ttft_band is not None and tpot_band is not None,
        )

    def watch(self, target: Target, forecast: Forecast, promise: Promise | None, sent: float) -> WatchedAnswer:
        """Watch a streamed answer to a request that is sent now."""
        self.due = max(self.due, sent + _SELDOM)
        return WatchedAnswer(self, target, forecast, promise, sent)

    def first_token(self, answer: WatchedAnswer, seconds: float) -> None:
        """A watched answer began, so long after it was sent."""
        target = answer.target
        self._ttft.add(target.worker, target.model, answer.forecast.ttft_by_rates, seconds)
        for on_first_token in self.on_first_token:
            on_first_token(answer)

    def answered(self, answer: WatchedAnswer, tpot: float | None) -> None:
        """A watched answer ended. `tpot`: seconds for each token after the first; None where it has no other."""
        target = answer.target
        if tpot is not None:
            self._tpot.add(target.worker, target.model, answer.forecast.tpot_by_rates, tpot)
        for on_answered in self.on_answered:
            on_answered(answer)

    def forget(self, worker: str) -> None:
        """A worker was removed."""
        self._ttft.forget(worker)
        self._tpot.forget(worker)


class WatchedAnswer:
    """One streamed answer and what was predicted of it. Times by the clock; `ttft` from its sending on, and `tpot`:
    None until they are known."""

    __slots__ = ("_forecasts", "begun", "forecast", "promise", "sent", "target", "tpot", "ttft")

    def __init__(
        self, forecasts: Forecasts, target: Target, forecast: Forecast, promise: Promise | None, sent: float
    ) -> None:
        self._forecasts = forecasts
        self.target = target
        self.forecast = forecast
        self.promise = promise
        self.sent = sent
        self.begun = 0.0
        self.ttft: float | None = None
        self.tpot: float | None = None

    def first_token(self, now: float | None) -> None:
        """It began. Only the first call counts. `now`: the time by the clock, where it was just read."""
        if self.ttft is None:
            self.begun = self._forecasts.clock() if now is None else now
            self.ttft = self.begun - self.sent
            self._forecasts.first_token(self, self.ttft)

    def ended(self, output_tokens: int) -> None:
        """It is complete, with so many tokens; 0: that is not known."""
        if self.ttft is not None:
            if output_tokens > 1:
                self.tpot = (self._forecasts.clock() - self.begun) / (output_tokens - 1)
            self._forecasts.answered(self, self.tpot)

    @property
    def kept(self) -> bool:
        """Whether what was promised was kept, as far as it is known. There is a promise."""
        promise = self.promise
        assert promise is not None
        in_time = promise.first_token_by is None or (self.ttft is not None and self.begun <= promise.first_token_by)
        return in_time and (promise.tpot is None or self.tpot is None or self.tpot <= promise.tpot)
