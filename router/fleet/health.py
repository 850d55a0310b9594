"""The health of a worker as its requests show it: outcomes, times to the first byte, and silence."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from math import inf
from typing import Final

from router.fleet.circuit import Circuit, CircuitLimits

# Number of results of a worker that are kept, and seconds after which they expire.
RECENT = 64
RECENT_SECONDS = 60.0
# Number of first bytes of several workers that suffice to estimate the usual time.
_ENOUGH = 2048
# Seconds after which a full worker without requests in flight receives one, because no end or first byte can reopen it.
FULL_SECONDS = 1.0
# Seconds for which errors of a worker count for nothing after another worker answered a request with the same error.
_EXCUSED_SECONDS = 2.0
# Seconds after its last refusal in which a worker counts as full, unless it is closed and has requests in flight.
_FORGET_FULL = 10.0


class Outcome(Enum):
    """The outcome of a request for its worker.

    - NEITHER: the client disconnected.
    - REFUSED: the worker refused the request (4xx), and computed nothing of it.
    - FULL: the worker refused the request because it is full.
    """

    SUCCEEDED = auto()
    FAILED = auto()
    NEITHER = auto()
    REFUSED = auto()
    FULL = auto()


# Constants, because access to a member of an enumeration is a lookup.
_FAILED: Final = Outcome.FAILED
_NEITHER: Final = Outcome.NEITHER
_REFUSED: Final = Outcome.REFUSED
_FULL: Final = Outcome.FULL


class FirstByte:
    """The time to a first byte, with the `work` tokens that were computed before it.

    Streamed answers are compared only with streamed ones: the others send their first byte after the last token.
    """

    __slots__ = ("at", "seconds", "streamed", "work")

    def __init__(self, work: int, streamed: bool, seconds: float, at: float) -> None:
        self.work = work
        self.streamed = streamed
        self.seconds = seconds
        self.at = at


class Result:
    """The outcome of a request that its worker is responsible for."""

    __slots__ = ("at", "failed")

    def __init__(self, failed: bool, at: float) -> None:
        self.failed = failed
        self.at = at


class Health:
    """The circuit of a worker, its requests in flight, and the outcomes of its last ones.

    - `ranks`: the health of each DP rank, if the worker has several.
    - `longest_answer`: the most tokens of one recent answer.
    """

    def __init__(
        self,
        limits: CircuitLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        worker: Health | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """Create the health of a worker, or of a rank of `worker`. `on_change`: a circuit opened or closed."""
        self.worker = worker
        self.ranks: dict[int, Health] = {}
        self._limits = limits or CircuitLimits()
        self._on_change = on_change
        self.circuit = Circuit(self._limits, clock, on_change)
        self.clock = clock
        self._last_byte = clock()
        self._heard = False  # a byte was received since `last_byte` was read
        self.attempts: dict[Attempt, None] = {}
        self.last_results: deque[Result] = deque(maxlen=RECENT)
        self.last_first_bytes: deque[FirstByte] = deque(maxlen=RECENT)
        self.longest_answer = 0
        self._places: int | None = None  # requests that may begin while the worker counts as full; None: it does not
        self._refused_at = self._paused_until = 0.0
        self._excused_at = -inf

    # Whether the worker is full, for all ranks together

    @property
    def full(self) -> bool:
        """True while no request may begin: the worker refused one as full, and since then none ended or had its first
        byte; or it asked for a pause.
        """
        places = self._places
        if places is None and not self._paused_until:
            return False
        now = self.clock()
        if now < self._paused_until:
            return True
        self._paused_until = 0.0
        if places is None or (places and now < self._refused_at + _FORGET_FULL):
            return False
        if places or (not self.attempts and now >= self._refused_at + _FORGET_FULL):
            self._places = None
        elif not self.attempts and now >= self._refused_at + FULL_SECONDS:
            self._places = 1
        return self._places == 0

    @property
    def counts_as_full(self) -> bool:
        """True while the worker is full, or may be so again after the next requests."""
        return self.full or self._places is not None

    @property
    def paused(self) -> bool:
        """True while the worker's own request for a pause counts."""
        return self._paused_until > 0 and self.clock() < self._paused_until

    def close(self) -> None:
        """Let no request begin until one in flight ends or has its first byte, because the worker is full."""
        self._places, self._refused_at = 0, self.clock()

    def pause(self, seconds: float) -> None:
        """Let no request begin for `seconds`, because the worker asked for it; then one."""
        now = self.clock()
        self._paused_until = max(self._paused_until, now + seconds)
        self._places, self._refused_at = 1, self._paused_until

    def freed(self) -> None:
        """Let one more request begin at a full worker, because one ended or had its first byte."""
        if self._places is not None and not self.paused:
            self._places += 1

    def begin(
        self,
        work: int,
        dp_rank: int = 0,
        streamed: bool = True,
        *,
        one_of_many: bool = False,
        now: float | None = None,
    ) -> Attempt:
        """Record that a request is sent.

        - `work`: the tokens to compute before its first byte.
        """
        if now is None:
            now = self.clock()
        if self._places:
            self._places -= 1
        health, number = self, self.circuit.begin()
        of_worker = number
        if one_of_many:
            rank = self.ranks.get(dp_rank)
            if rank is None:
                rank = self.ranks[dp_rank] = Health(self._limits, self.clock, self, self._on_change)
            health, number = rank, rank.circuit.begin()
        attempt = Attempt(health, number, of_worker, work if work > 1 else 1, dp_rank, streamed, now)
        self._begun(attempt, now)
        if health is not self:
            health._begun(attempt, now)
        return attempt

    @property
    def last_byte(self) -> float:
        """The time of the last byte: now, if bytes arrived since the last read. No byte reads the clock."""
        if self._heard:
            self._heard = False
            self._last_byte = self.clock()
        return self._last_byte

    def _begun(self, attempt: Attempt, now: float) -> None:
        if not self.attempts:
            self._last_byte, self._heard = now, False  # Silence without requests does not count.
        self.attempts[attempt] = None

    def usable_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks whose circuits allow requests; all ranks if every circuit is open."""
        if not self.ranks:
            return ranks
        return tuple(r for r in ranks if r not in self.ranks or self.ranks[r].circuit.allows) or ranks

    def usable(self, dp_rank: int) -> bool:
        """Return whether the circuit of a rank allows requests."""
        return not self.ranks or dp_rank not in self.ranks or self.ranks[dp_rank].circuit.allows

    def in_flight(self) -> Counter[int]:
        """Return the number of requests in flight on each rank."""
        return Counter(attempt.dp_rank for attempt in self.attempts)

    def movable(self) -> list[Attempt]:
        """Return the requests without a first byte that can be moved to another worker, the oldest first."""
        return [attempt for attempt in self.attempts if attempt.give_up is not None]

    def waiting(self) -> list[Attempt]:
        """Return the requests without a first byte, the oldest first."""
        return [attempt for attempt in self.attempts if attempt.waits]

    def first_bytes(self) -> list[FirstByte]:
        """Return the recent times to first bytes."""
        since = self.clock() - RECENT_SECONDS
        return [seen for seen in self.last_first_bytes if seen.at > since]

    def results(self) -> list[Result]:
        """Return the recent outcomes."""
        since = self.clock() - RECENT_SECONDS
        return [result for result in self.last_results if result.at > since]

    @property
    def at_risk(self) -> bool:
        """True if the next failure may eject it, because it is one of several."""
        if self.circuit.at_risk:
            return True
        return sum(result.failed for result in self.results()) + 1 >= self._limits.failures

    @property
    def excused(self) -> bool:
        """True if another worker has just answered the same error to one of its requests."""
        return self.clock() < self._excused_at + _EXCUSED_SECONDS

    def excuse(self) -> None:
        """Forget the failures, because another worker answered the same error: the requests are at fault."""
        self._excused_at = self.clock()
        succeeded = [result for result in self.last_results if not result.failed]
        self.last_results.clear()
        self.last_results.extend(succeeded)
        self.circuit.close()

    def forget(self) -> None:
        """Forget recent outcomes, because the worker was restarted or is ejected."""
        self.last_results.clear()
        self.last_first_bytes.clear()
        self.longest_answer = 0
        self.ranks.clear()
        if self._on_change is not None:
            self._on_change()

    def move_waiting(self, whole_answers: bool = True) -> int:
        """Move requests without a first byte to other workers, and return their number."""
        moved = 0
        for attempt in self.attempts:
            if attempt.give_up is not None and (attempt.streamed or whole_answers) and attempt.give_up():
                attempt.give_up = None
                moved += 1
        return moved

    def heard(self) -> None:
        """Record that bytes of an answer were received. The clock is not read."""
        self._heard = True
        if self.worker is not None:
            self.worker._heard = True

    def ended(self, attempt: Attempt, number: int, outcome: Outcome, reason: str, now: float) -> None:
        """Record the end of a request, which has this number at the circuit."""
        del self.attempts[attempt]
        if outcome is _NEITHER or outcome is _REFUSED or outcome is _FULL:
            self.circuit.ended(number)
            return
        if outcome is _FAILED:
            self.failed(number, reason, now)
            return
        if not self.circuit.untroubled:
            self.circuit.succeeded(number)
        self.last_results.append(Result(False, now))

    def failed(self, number: int, reason: str, now: float) -> None:
        """Record that a request failed because of the worker. `number`: its number at the circuit."""
        self.circuit.failed(number, reason)
        self.last_results.append(Result(True, now))


class Attempt:
    """One request on one worker, from the choice to the end.

    - `waits`: whether its first byte is awaited from this worker.
    - `give_up`: moves the request to another worker, and returns whether it does; None if it may not be moved.
    - `most_tokens`: the most tokens of its answer; None if the request does not limit them.

    Parameters `now` are the time by the health's clock, if the caller has read it.
    """

    def __init__(
        self, health: Health, number: int, of_worker: int, work: int, dp_rank: int, streamed: bool, now: float
    ) -> None:
        """Create the attempt of a request.

        - `of_worker`: its number at the circuit of its worker.
        """
        self.begun = now
        self.work = work
        self.dp_rank = dp_rank
        self.streamed = streamed
        self.waits = True
        self.give_up: Callable[[], bool] | None = None
        self.most_tokens: int | None = None
        self.ended = self.failed = False
        self.health = health
        self._number = number
        self._of_worker = of_worker

    def waits_for_another(self) -> None:
        """Record that another worker must finish first. Until then this worker is not judged by the first byte."""
        self.waits = False

    def waits_from_now(self) -> None:
        """Record that the other worker has finished: the first byte is awaited from now on."""
        self.begun, self.waits = self.health.clock(), True

    def heard(self, now: float | None = None) -> None:
        """Record that bytes of the answer were received."""
        health = self.health
        health.heard()
        if self.waits and not self.ended:
            self.waits = False
            if now is None:
                now = health.clock()
            seen = FirstByte(self.work, self.streamed, now - self.begun, now)
            health.last_first_bytes.append(seen)
            if health.worker is not None:
                health.worker.last_first_bytes.append(seen)
            if self.streamed:  # otherwise the end follows at once
                (health.worker or health).freed()

    def answered(self, tokens: int) -> None:
        """Record the tokens of the whole answer."""
        for health in (self.health, self.health.worker):
            if health is not None and tokens > health.longest_answer:
                health.longest_answer = tokens

    def end(self, outcome: Outcome, reason: str = "", now: float | None = None) -> None:
        """Record the end of the request. Later calls have no effect."""
        if self.ended:
            return
        self.ended = True
        self.failed = outcome is _FAILED or outcome is _REFUSED or outcome is _FULL
        health = self.health
        if now is None:
            now = health.clock()
        if health.worker is not None:
            health.worker.ended(self, self._of_worker, outcome, reason, now)
        health.ended(self, self._number, outcome, reason, now)
        if outcome is not _REFUSED and outcome is not _FULL:  # these had no place
            (health.worker or health).freed()

    @property
    def at_risk(self) -> bool:
        """True if its failure may eject the worker or the rank."""
        return self.health.at_risk or (self.health.worker is not None and self.health.worker.at_risk)

    def settle(self, at_fault: bool, reason: str) -> None:
        """Record after its end whether the request was at fault for its error, or failed because of the worker."""
        health, now = self.health, self.health.clock()
        for each, number in ((health.worker, self._of_worker), (health, self._number)):
            if each is not None and at_fault:
                each.excuse()
            elif each is not None:
                each.failed(number, reason, now)


def latest(of_each: Sequence[list[FirstByte]]) -> list[FirstByte]:
    """Return the latest first bytes of several workers: enough of them to estimate the usual time."""
    most = max(_ENOUGH // max(len(of_each), 1), 1)
    return [seen for some in of_each for seen in some[-most:]]


def expected_seconds(seen: Iterable[FirstByte], work: int, streamed: bool) -> float | None:
    """Return the expected time to a first byte after `work` tokens; None without comparable first bytes.

    It is the 90th percentile of the seen times. They are scaled up for more work, and not scaled down for less.
    """
    scaled = sorted(first.seconds * max(1.0, work / first.work) for first in seen if first.streamed == streamed)
    return scaled[int(len(scaled) * 0.9)] if scaled else None
