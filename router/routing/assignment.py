"""Where a request goes, and what is held for it there until it ends."""

from __future__ import annotations

from array import array
from typing import Protocol

from indexer import Target
from router.apis.usage import Usage
from router.cache_state.hit_audit import CachePrediction
from router.cache_state.in_flight_prefixes import ReleaseCallback
from router.fleet.health import Attempt, Outcome
from router.fleet.worker import Worker
from router.load.target_load import Reservation
from router.policies import Decision
from router.prediction.learned import RequestTiming
from router.prediction.predictions import WatchedAnswer
from router.prediction.slo import SLO, Prediction
from router.routing.disaggregation.decision import Disaggregation
from router.routing.routable_rank import RoutableRank
from router.routing.routed_prompt import RoutedPrompt

NO_HASHES: list[array[int]] = []


class Selection:
    """A decision that nothing has been reserved for yet.

    `rank`: what was chosen; `hashes`: the chunk hashes of the request's prompts there. `by_events`: the overlap by
    events and prompts in flight, whether or not it is the one used. `best_overlap`: the most tokens that any candidate
    has. `disaggregation`: whether another worker computes the prompt, where a decode worker was chosen; `prefill` is
    the selection of that. `slo`: the request's, if it has one. `prediction`: of its latency there. `slo_missed_by`: the
    seconds by which its SLO is expected to be missed; 0 if it is met.
    """

    def __init__(
        self,
        decision: Decision,
        rank: RoutableRank,
        hashes: list[array[int]] = NO_HASHES,
        by_events: int = 0,
        best_overlap: int = 0,
        disaggregation: Disaggregation | None = None,
        prefill: Selection | None = None,
        slo: SLO | None = None,
        prediction: Prediction | None = None,
        slo_missed_by: float = 0.0,
    ) -> None:
        self.decision = decision
        self.rank = rank
        self.hashes = hashes
        self.by_events = by_events
        self.best_overlap = best_overlap
        self.disaggregation = disaggregation
        self.prefill = prefill
        self.slo = slo
        self.prediction = prediction
        self.slo_missed_by = slo_missed_by

    @property
    def slo_missed(self) -> bool:
        """Whether the request's SLO is expected to be missed there."""
        return self.slo_missed_by > 0

    @property
    def worker(self) -> Worker:
        return self.rank.worker


class RequestSampler(Protocol):
    """Looks at some of the requests: at the next one placed after `due`, in seconds of `time.monotonic`."""

    @property
    def due(self) -> float: ...

    def placed(self, prompt: RoutedPrompt, assignment: Assignment) -> SampledRequest | None:
        """A request was placed. Returns what is to know of its answer, or None."""


class SampledRequest(Protocol):
    """Hears what becomes of a request."""

    def first_byte(self) -> None:
        """Its answer began."""

    def answered(self, usage: Usage | None) -> None:
        """It was answered in full."""


class Assignment:
    """Where a request goes, and its share of that target's load until `release`.

    `recorded`: whether its prompts count as held soon where it goes. `now`: the time, where it was just read.
    """

    def __init__(self, selection: Selection, reservation: Reservation, attempt: Attempt) -> None:
        self.worker: Worker = selection.rank.worker
        self.target: Target = selection.rank.target
        self.selection = selection
        self.decision = selection.decision
        self.recorded = False
        self.reservation = reservation
        self.attempt = attempt
        self.cache_prediction: CachePrediction | None = None  # where its prompts are known
        self.timing: RequestTiming | None = None
        self.sample: SampledRequest | None = None
        self.watched: WatchedAnswer | None = None  # where it is compared with what was predicted
        self.prefill: Assignment | None = None  # where the prompt is computed, if that is another worker
        self._callbacks: list[ReleaseCallback] | None = None

    @property
    def overlap(self) -> int:
        """Tokens of the prompt that the target is expected to serve from its cache."""
        return self.decision.chosen.overlap

    @property
    def wants_usage(self) -> bool:
        """Whether anything is learned from what the answer says of its tokens."""
        return (
            self.timing is not None
            or self.sample is not None
            or self.cache_prediction is not None
            or self.watched is not None
        )

    def first_byte(self, now: float | None = None) -> None:
        """The answer began."""
        self.reservation.first_byte(now)
        if self.timing:
            self.timing.first_byte()
        if self.watched is not None:
            self.watched.first_token(now)
        if self.sample:
            self.sample.first_byte()

    def when_released(self, callback: ReleaseCallback) -> None:
        """Have this called, too, when the request ended."""
        if self._callbacks is None:
            self._callbacks = []
        self._callbacks.append(callback)

    def release(self, now: float | None = None) -> None:
        """The request ended, however it did. Only the first call counts."""
        self.reservation.release(now)
        if not self.attempt.ended:
            self.attempt.end(Outcome.NEITHER, now=now)
        callbacks = self._callbacks
        if callbacks is not None:
            self._callbacks = None
            for callback in callbacks:
                callback(self.attempt.failed)
        if self.prefill is not None:
            self.prefill.release(now)
