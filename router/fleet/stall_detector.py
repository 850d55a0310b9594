"""Ejection of workers: those that hang, and a bounded share of those that are outliers.

Outliers are workers whose recent requests fail far more often, or start far later, than those of similar workers. The
search runs every second over thousands of workers. Therefore each worker is summarized once, and only conspicuous
workers are compared with the others.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

import structlog

from indexer import Indexer, Target
from router.fleet.circuit import CircuitState
from router.fleet.health import Attempt, FirstByte, Health, expected_seconds, latest
from router.fleet.worker import Worker, WorkerState
from router.settings import FleetSettings

log = structlog.get_logger()
# Seconds between two checks, and the number of checks between two searches for outliers.
_INTERVAL = 0.25
_OUTLIER_TURNS = 4
# Minimum number of workers with the same models for a search for outliers.
_FEWEST_TO_COMPARE = 3
# Share of the workers that may be ejected as outliers; one may always be.
_MOST_EJECTED = 0.3
# An answer that is not streamed is late after its most tokens at this slow pace, and never sooner than the minimum.
# Without a limit of its tokens, it may have these, or twice those of the model's longest recent answer.
_SLOWEST_TOKEN = 0.2
_WHOLE_ANSWER = 60.0
_PLAUSIBLE_TOKENS = 4096
# States that are logged as information. Others are logged as warnings.
_WELL = (
    WorkerState.READY,
    WorkerState.WARMING,
    WorkerState.DRAINING,
    WorkerState.DRAINED,
    WorkerState.ASLEEP,
    WorkerState.PAUSED,
)
# A worker with slow answers or long prompts may be silent for this many times as long, up to these seconds.
_PATIENCE = 1.5
_LONGEST_SILENCE = 10.0
# An answer takes the router at most this many turns of its loop, each of which may be as late as a recent one.
_TURNS_OF_ANSWER = 4
_RECENT_TURNS = 40


@dataclass(frozen=True, slots=True)
class OutlierLimits:
    """When a worker counts as an outlier.

    - `factor`: its first bytes take more than this many times the usual time.
    - `errors`: its share of failures exceeds that of the others by more than this.
    - `samples`: minimum number of results on both sides.
    - `seconds`: its first bytes take this much longer at least.
    """

    factor: float = 5.0
    errors: float = 0.3
    samples: int = 10
    seconds: float = 0.5


class Recent:
    """The recent requests of a worker.

    - `errors`: the share that failed; None below the number of requests that `limits.samples` asks for.
    - `seconds`: the median time to the first byte of streamed responses.
    """

    def __init__(self, health: Health, limits: OutlierLimits) -> None:
        results = health.results()
        failed = sum(result.failed for result in results)
        self.errors = failed / len(results) if len(results) >= limits.samples else None
        self.first_bytes = [seen for seen in health.first_bytes() if seen.streamed]
        self.seconds = median([seen.seconds for seen in self.first_bytes]) if self.first_bytes else 0.0


class Alike:
    """Workers that serve the same models."""

    def __init__(self, workers: Sequence[Recent], limits: OutlierLimits) -> None:
        self._workers = workers
        self._limits = limits
        # A lower bound of the usual time: at least half of the workers take this long.
        known = [worker.seconds for worker in workers if worker.first_bytes]
        self._typical = median_low(known) if known else 0.0

    def outlier(self, worker: Recent) -> str | None:
        """Return why a worker is an outlier, in words; None if it is not."""
        return self._fails(worker) or self._is_late(worker)

    def _fails(self, worker: Recent) -> str | None:
        if worker.errors is None or worker.errors <= self._limits.errors:
            return None
        errors = [other.errors for other in self._workers if other is not worker and other.errors is not None]
        if not errors or worker.errors <= median(errors) + self._limits.errors:
            return None
        return f"{worker.errors:.0%} of its requests fail, {median(errors):.0%} elsewhere"

    def _is_late(self, worker: Recent) -> str | None:
        limits, seconds = self._limits, worker.seconds
        if seconds <= max(limits.seconds, limits.factor * self._typical) or len(worker.first_bytes) < limits.samples:
            return None
        theirs = latest([other.first_bytes for other in self._workers if other is not worker])
        if len(theirs) < limits.samples:
            return None
        usual = _usual(theirs, worker.first_bytes)
        if seconds <= usual + limits.seconds or seconds <= limits.factor * usual:
            return None
        return f"first bytes take {seconds:.1f} s, {usual:.1f} s elsewhere"


def _usual(theirs: list[FirstByte], work: list[FirstByte]) -> float:
    """Return the workers' median time to a first byte for the median of `work`, with which time never falls."""
    tokens = sorted(seen.work for seen in work)
    middle = tokens[(len(tokens) - 1) // 2], tokens[len(tokens) // 2]
    return sum(expected_seconds(theirs, each, True) or 0.0 for each in middle) / 2


@dataclass(frozen=True, slots=True)
class StallLimits:
    """When a worker counts as hung.

    - `silence`: seconds without a sign of life.
    - `factor`: a first byte may take this many times the expected time.
    """

    silence: float = 1.0
    factor: float = 3.0


@dataclass(frozen=True, slots=True)
class Usual:
    """The recent answers of the workers with the same models: their first bytes, and the most tokens of one."""

    first_bytes: list[FirstByte]
    longest_answer: int = 0

    @classmethod
    def of(cls, workers: Sequence[Health]) -> Usual:
        """Return the recent answers of workers."""
        longest = max([worker.longest_answer for worker in workers], default=0)
        return cls(latest([worker.first_bytes() for worker in workers]), longest)


class StallDetector:
    """Checks all workers several times a second, ejects some, and logs every change of a worker's state."""

    def __init__(self, settings: FleetSettings, indexer: Indexer) -> None:
        self._stall = StallLimits(settings.stall_seconds)
        self._outlier = OutlierLimits()
        self._indexer = indexer
        self._logged: dict[Worker, WorkerState] = {}
        self._late: deque[float] = deque(maxlen=_RECENT_TURNS)

    async def run(self, workers: Callable[[], Sequence[Worker]], removed: Callable[[], Sequence[Worker]]) -> None:
        """Check the workers, and `removed` ones with requests in flight, at intervals, until cancelled."""
        turn = 0
        while True:
            now, leaving = workers(), removed()
            self.eject_stalled(now, leaving)
            self.eject_stalled_ranks([*now, *leaving])
            if turn % _OUTLIER_TURNS == 0:
                self.eject_outliers(now)
            self.log_changes(now)
            turn += 1
            asleep = time.monotonic()
            await asyncio.sleep(_INTERVAL)
            self.ran_late(time.monotonic() - asleep - _INTERVAL)

    def ran_late(self, seconds: float) -> None:
        """Record by how much the router's own loop was late."""
        self._late.append(seconds)

    @property
    def _limits(self) -> StallLimits:
        """The limits, extended by what the router's own lateness explains."""
        silence = self._stall.silence + _TURNS_OF_ANSWER * max(self._late, default=0.0)
        return replace(self._stall, silence=silence)

    def eject_stalled(self, workers: Sequence[Worker], removed: Sequence[Worker] = ()) -> None:
        """Open the circuits of hung workers, and move their waiting requests. Requests only move to `workers`."""
        limits = self._limits
        usual: dict[frozenset[tuple[bool, str]], Usual] = {}  # by the work of workers
        for worker in [*workers, *removed]:
            if not worker.health.attempts:
                continue
            silent = self._silence(worker.health, worker.metrics.progress_at, worker.targets)
            unanswered = worker.metrics.unanswered if worker.metrics.answers else silent
            if unanswered >= self._stall.silence / 4 and worker.probe_began is None:
                worker.probe_now.set()  # A worker that answers probes is alive.
            if silent < limits.silence or not _others(worker, workers):
                continue  # This is the cheap check, which most workers pass.
            if not (worker.up and worker.computes):
                self._move(worker, worker.problem or f"its engine is {worker.state}")
                continue
            work = worker.work()
            seen = usual.get(work)
            if seen is None:
                seen = usual[work] = Usual.of([other.health for other in workers if other.work() & work])
            own = replace(limits, silence=_plausible_silence(worker, limits, seen))
            dead = self._unanswered(worker)
            reason = stalled(worker.health, own, seen, silent, dead)
            if reason is None:
                continue
            circuit = worker.health.circuit
            if circuit.state is not CircuitState.OPEN:
                circuit.open(reason)
            # While the worker lives, it may still compute answers that are not streamed. Late ones are moved.
            self._move(worker, reason, dead > 0 or _whole_answer_late(worker.health, own, seen))

    def eject_stalled_ranks(self, workers: Sequence[Worker]) -> None:
        """Open the circuits of single ranks that hang while other ranks of their worker respond."""
        limits = self._limits
        for worker in workers:
            for dp_rank, health in worker.health.ranks.items():
                others = [other for rank, other in worker.health.ranks.items() if rank != dp_rank]
                if not (worker.up and worker.computes and others) or health.circuit.state is CircuitState.OPEN:
                    continue
                targets = (target for target in worker.targets if target.dp_rank == dp_rank)
                silent = self._silence(health, worker.metrics.rank_progress_at(dp_rank), targets)
                if silent < limits.silence:
                    continue
                reason = rank_stalled(health, limits, Usual.of([health, *others]), silent)
                if reason is not None:
                    health.circuit.open(reason)
                    moved = health.move_waiting()
                    log.warning("rank ejected", worker=worker.name, dp_rank=dp_rank, moved=moved, reason=reason)

    def eject_outliers(self, workers: Sequence[Worker]) -> None:
        """Open the circuits of outliers, for at most the share `_MOST_EJECTED` of the workers."""
        up = [worker for worker in workers if worker.up and not worker.draining]
        well = [worker for worker in up if worker.health.circuit.state is CircuitState.CLOSED]
        left = max(int(_MOST_EJECTED * len(up)), 1) - (len(up) - len(well))
        if left <= 0:
            return
        recent = {worker: Recent(worker.health, self._outlier) for worker in well}
        works = {worker: worker.work() for worker in well}
        for work in set(works.values()):
            alike = [recent[worker] for worker in well if works[worker] & work]
            if len(alike) < _FEWEST_TO_COMPARE:
                continue
            compared = Alike(alike, self._outlier)
            for worker in well:
                if works[worker] == work and left > 0 and (reason := compared.outlier(recent[worker])):
                    worker.health.circuit.open(reason)
                    worker.health.forget()
                    left -= 1

    def log_changes(self, workers: Sequence[Worker]) -> None:
        """Log the workers whose state has changed."""
        for worker in workers:
            before, state = self._logged.get(worker, WorkerState.NEW), worker.state
            if state is not before:
                write = log.info if state in _WELL else log.warning
                write("worker state", worker=worker.name, state=str(state), before=str(before), reason=worker.reason)
        self._logged = {worker: worker.state for worker in workers}

    def _move(self, worker: Worker, reason: str, whole_answers: bool = True) -> None:
        """Move the waiting requests of a worker."""
        if moved := worker.health.move_waiting(whole_answers):
            log.warning("requests moved to other workers", worker=worker.name, requests=moved, reason=reason)

    def _unanswered(self, worker: Worker) -> float:
        """Return the seconds for which a worker has answered neither probes nor, if it ever did, scrapes."""
        if not worker.metrics.answers:
            return worker.probe_unanswered
        return worker.metrics.unanswered if worker.probe_unanswered >= self._stall.silence / 2 else 0.0

    def _silence(self, health: Health, progress_at: float, targets: Iterable[Target]) -> float:
        """Return the seconds since the last sign of work of a worker or rank with these targets."""
        silent = health.clock() - max(health.last_byte, progress_at)
        if silent < self._stall.silence:
            return silent
        reports = [self._indexer.report(target) for target in targets]
        events = [report.stream.received_at for report in reports if report and report.stream]
        return min([silent, *(time.time() - at for at in events if at is not None)])


def _others(worker: Worker, workers: Sequence[Worker]) -> bool:
    return any(
        other is not worker and other.takes_work and other.trusted and other.work() & worker.work() for other in workers
    )


def _plausible_silence(worker: Worker, limits: StallLimits, usual: Usual) -> float:
    """Return the seconds for which a worker may show no sign of life, by what it does.

    An engine that computes a long prompt, or whose machine is busy, may answer nothing meanwhile.
    """
    plausible = max(worker.answer_seconds, default=0.0)
    for attempt in worker.health.waiting():
        if attempt.streamed:  # the first byte of others takes a whole answer, in which engines are heard of
            plausible = max(plausible, expected_seconds(usual.first_bytes, attempt.work, True) or 0.0)
            break
    return max(limits.silence, min(_PATIENCE * plausible, _LONGEST_SILENCE))


def stalled(health: Health, limits: StallLimits, usual: Usual, silent: float, unanswered: float) -> str | None:
    """Return why a worker counts as hung; None if it does not.

    - `silent`: seconds since the last sign of work: bytes of an answer, an event, or a higher counter in its metrics.
    - `unanswered`: seconds since an unanswered scrape began.
    """
    if not health.attempts or silent < limits.silence:
        return None
    if unanswered >= limits.silence:
        return f"no sign of life for {min(silent, unanswered):.1f} s"
    return _late_first_byte(health, health.movable(), limits, usual)


def rank_stalled(health: Health, limits: StallLimits, usual: Usual, silent: float) -> str | None:
    """Return why a rank counts as hung while its worker responds; None if it does not."""
    if silent < limits.silence:
        return None
    return _late_first_byte(health, health.waiting(), limits, usual)


def _whole_answer_late(health: Health, limits: StallLimits, usual: Usual) -> bool:
    """Return whether an answer that is not streamed and can be moved is late."""
    whole = [attempt for attempt in health.movable() if not attempt.streamed]
    return _late_first_byte(health, whole, limits, usual) is not None


def _late_first_byte(health: Health, attempts: list[Attempt], limits: StallLimits, usual: Usual) -> str | None:
    """Return why the oldest stream or the oldest whole answer of some requests is late; None if neither is."""
    for streamed in (True, False):
        oldest = next((attempt for attempt in attempts if attempt.streamed is streamed), None)
        if oldest is None:
            continue
        expected = expected_seconds(usual.first_bytes, oldest.work, streamed)
        least = limits.silence
        if not streamed and expected is not None:
            least, most = _WHOLE_ANSWER, oldest.most_tokens
            if most is None:
                most = max(_PLAUSIBLE_TOKENS, 2 * usual.longest_answer)
            expected += most * _SLOWEST_TOKEN
        age = health.clock() - oldest.begun
        if expected is not None and age >= max(least, limits.factor * expected):
            return f"no first byte for {age:.1f} s, expected within {expected:.2f} s"
    return None
