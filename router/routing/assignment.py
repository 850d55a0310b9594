"""The choice for a request, and the load that is reserved for it until it ends."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from indexer import Target
from indexer.targets import WorkerNames
from router.apis.requests import RoutedRequest
from router.apis.usage import Usage
from router.cache_state.in_flight_prefixes import ReleaseCallback
from router.cache_state.prompt_noise import PromptNoise
from router.cache_state.target_audit import CachePrediction
from router.fleet.health import Attempt, Outcome
from router.fleet.worker import Worker
from router.load.target_load import ReservedLoad
from router.policies import Candidate, Decision
from router.policies.records import Source
from router.prediction.learned import RequestTiming
from router.prediction.predictions import WatchedAnswer
from router.prediction.slo import SLO, Prediction
from router.programs import Call
from router.routing.disaggregation.pair_rules import Excluded
from router.routing.disaggregation.transfers import WatchedTransfer
from router.routing.pulls import PullEndpoint, Pulls
from router.routing.ranks import RoutableRank

NO_HASHES: list[array[int]] = []
SAMPLES_PER_SECOND: Final = 20
MOST_SAMPLES: Final = 256


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """The verdict on whether another worker than the decode worker computes a prompt.

    - `prefill`: the choice of the prefill worker; None if the decode worker computes the prompt.
    - `reason`: the reason in words, for logs and explanations.
    - `inputs`: the values that the verdict depends on, for logs and explanations.
    - `predict`: returns the predicted latency on a decode worker, with the chosen prefill worker if there is one.
    - `excluded`: the workers of other revisions, and the barred pairs.
    """

    prefill: Decision | None
    reason: str
    inputs: dict[str, Any]
    predict: Callable[[Candidate], Prediction]
    excluded: Excluded

    def as_json(self, names: WorkerNames) -> dict[str, Any]:
        """Return the verdict as a part of an explained decision. `names`: the names of workers."""
        report: dict[str, Any] = {"remote_prefill": self.prefill is not None, "reason": self.reason, **self.inputs}
        report |= self.excluded.as_json(names)
        if self.prefill is not None:
            target = self.prefill.chosen.target
            report["prefill"] = {"worker": names.get(target.worker), "dp_rank": target.dp_rank}
            report["unit"] = self.prefill.unit
            report["prefill_candidates"] = [
                {"worker": names.get(each.target.worker), "dp_rank": each.target.dp_rank, "terms": cost.terms}
                for cost in self.prefill.costs
                for each in (cost.candidate,)
            ]
        return report


class Selection:
    """A chosen rank, for which nothing is reserved yet.

    - `overlap`: the tokens of the prompt that the target is expected to serve from its cache.
    - `loadable`: the tokens that the target is expected to load from its source.
    - `reused`: both together.
    - `by_events`: the overlap by events and prompts in flight, which the decision may not have used.
    - `disaggregation`: the verdict on a second worker for the prefill; None if the rank is no decode worker.
    - `prefill`: the selection of the second worker.
    - `slo_missed_by`: the seconds by which the SLO is expected to be missed; 0 if it is met.
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
        chosen = decision.chosen
        self.decision = decision
        self.overlap = chosen.overlap
        self.loadable = 0 if chosen.source is None else chosen.source.tokens
        self.reused = self.overlap + self.loadable
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
        """True if the request's SLO is expected to be missed there."""
        return self.slo_missed_by > 0

    @property
    def worker(self) -> Worker:
        return self.rank.worker


class Sample:
    """A placed request that is kept for the live page, with the times of its answer.

    - `placed`: its prompt and its assignment; None once they were read.
    - `placed_at`, `first_byte_at`, `ended_at`: in seconds of the routing clock; None: not yet.
    - `failed`: its worker did not compute the prompt.
    - `usage`: the token counts of its complete answer.
    """

    def __init__(self, prompt: RoutedRequest, assignment: Assignment, now: float, clock: Callable[[], float]) -> None:
        self.placed: tuple[RoutedRequest, Assignment] | None = (prompt, assignment)
        self.placed_at = now
        self.first_byte_at: float | None = None
        self.ended_at: float | None = None
        self.failed = False
        self.usage: Usage | None = None
        self._clock = clock

    def first_byte(self, now: float | None) -> None:
        """Record the first byte of the answer. Only the first call counts."""
        if self.first_byte_at is None:
            self.first_byte_at = self._clock() if now is None else now

    def ended(self, failed: bool, now: float | None) -> None:
        """Record the end of the request, whatever its outcome. Only the first call counts."""
        if self.ended_at is None:
            self.ended_at, self.failed = self._clock() if now is None else now, failed


class Samples:
    """The samples that were not read yet: at most `SAMPLES_PER_SECOND` of a second, and the last `MOST_SAMPLES`.

    - `due`: requests before this time are not sampled.
    - `noise`: samples the turns of sessions; None if they are not examined.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, noise: PromptNoise | None = None) -> None:
        self.due = 0.0
        self.noise = noise
        self._clock = clock
        self._kept: deque[Sample] = deque(maxlen=MOST_SAMPLES)

    def keep(self, prompt: RoutedRequest, assignment: Assignment, now: float) -> None:
        """Keep a request that was placed at `now`."""
        self.due = now + 1 / SAMPLES_PER_SECOND
        assignment.sample = Sample(prompt, assignment, now, self._clock)
        self._kept.append(assignment.sample)

    def take(self) -> list[Sample]:
        """Return the samples since the last call."""
        kept = list(self._kept)
        self._kept.clear()
        return kept


class Assignment:
    """A placed request, and its share of the target's load until `release`.

    - `overlap`, `loadable`: as in its selection.
    - `on_release`: called once, when the request ends.
    - `recorded`: whether its prompts count as cached soon at the target.
    """

    def __init__(self, selection: Selection, reservation: ReservedLoad, attempt: Attempt) -> None:
        self.worker: Worker = selection.rank.worker
        self.target: Target = selection.rank.target
        self.selection = selection
        self.decision = selection.decision
        self.overlap = selection.overlap
        self.loadable = selection.loadable
        self.recorded = False
        self.reservation = reservation
        self.attempt = attempt
        self.cache_prediction: CachePrediction | None = None  # where its prompts are known
        self.timing: RequestTiming | None = None
        self.sample: Sample | None = None
        self.watched: WatchedAnswer | None = None  # where it is compared with what was predicted
        self.prefill: Assignment | None = None  # where the prompt is computed, if that is another worker
        self.transfer: WatchedTransfer | None = None  # from there
        self.release_load: Callable[[], None] | None = None  # where it loads from a pool or a peer
        self.pull: Source | None = None  # where it pulls from a peer
        self.call: Call | None = None  # where it is a call of a session
        self.on_release: list[ReleaseCallback] = []

    def peer_to_name(self, pulls: Pulls | None) -> PullEndpoint | None:
        """Return the peer that its request names; None without one, or if the peer was removed since."""
        peer = None if self.pull is None else self.pull.peer
        endpoint = None if peer is None or pulls is None else pulls.endpoint(peer)
        if endpoint is None:
            self.pull = None
        return endpoint

    @property
    def wants_usage(self) -> bool:
        """True if anything is learned from the token counts of the answer."""
        return (
            self.timing is not None
            or self.sample is not None
            or self.cache_prediction is not None
            or self.watched is not None
        )

    def first_byte(self, now: float | None = None) -> None:
        """Release the prefill's share of the load, because the answer began. `now`: the clock's time, if just read."""
        self.reservation.first_byte(now)
        if self.transfer is not None:
            self.transfer.end()
        if self.release_load is not None:
            self.release_load()
        if self.timing:
            self.timing.first_byte()
        if self.watched is not None:
            self.watched.first_token(now)
        if self.sample is not None:
            self.sample.first_byte(now)

    def prefilled(self) -> None:
        """Await the first byte from now on, because another worker has computed the prompt."""
        self.attempt.waits_from_now()
        if self.transfer is not None:
            self.transfer.begin()

    def encoded(self) -> None:
        """Await the first byte from now on, because the media of the prompt are encoded."""
        self.attempt.waits_from_now()
        if self.timing is not None:
            self.timing.sent_again()

    def release(self, now: float | None = None) -> None:
        """Release everything that is reserved, because the request ended. Only the first call counts."""
        self.reservation.release(now)
        if self.release_load is not None:
            self.release_load()
        if not self.attempt.ended:
            self.attempt.end(Outcome.NEITHER, now=now)
        if self.sample is not None:
            self.sample.ended(self.attempt.failed, now)
        callbacks, self.on_release = self.on_release, []
        for callback in callbacks:
            callback(self.attempt.failed)
        if self.prefill is not None:
            self.prefill.release(now)
