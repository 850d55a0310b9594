"""What requests show of their worker's health: how they end, how long the first byte takes, and silence."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from router.fleet.circuit import Circuit, CircuitLimits

RECENT = 64  # results of a worker that are remembered
RECENT_SECONDS = 60.0
_ENOUGH = 2048  # first bytes of many workers, to know what is usual


class Outcome(Enum):
    """How a request ended, as far as it is its worker's doing. NEITHER: its client left, or asked for nonsense."""

    SUCCEEDED = auto()
    FAILED = auto()
    NEITHER = auto()


# Members of an enumeration are looked up in it each time.
_FAILED: Final = Outcome.FAILED
_NEITHER: Final = Outcome.NEITHER


class FirstByte:
    """How long a first byte took, when `work` tokens were to be computed before it.

    Only a streamed answer's first byte comes before its last, so that the two kinds do not compare.
    """

    __slots__ = ("at", "seconds", "streamed", "work")

    def __init__(self, work: int, streamed: bool, seconds: float, at: float) -> None:
        self.work = work
        self.streamed = streamed
        self.seconds = seconds
        self.at = at


class Result:
    """Whether a request failed."""

    __slots__ = ("at", "failed")

    def __init__(self, failed: bool, at: float) -> None:
        self.failed = failed
        self.at = at


class Health:
    """One worker's circuit, its requests in flight, and how the last ones went.

    `ranks`: the same of each of its DP ranks, where it has several.
    """

    def __init__(
        self,
        limits: CircuitLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        worker: Health | None = None,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`worker`: the health of all of it, where this is that of a rank. `on_change` is called when its circuit, or
        that of a rank, opens or closes."""
        self.worker = worker
        self.ranks: dict[int, Health] = {}
        self._limits = limits or CircuitLimits()
        self._on_change = on_change
        self.circuit = Circuit(self._limits, clock, on_change)
        self.clock = clock
        self._last_byte = clock()
        self._heard = False  # since the last byte was asked for
        self.attempts: dict[Attempt, None] = {}  # the oldest first
        self.last_results: deque[Result] = deque(maxlen=RECENT)
        self.last_first_bytes: deque[FirstByte] = deque(maxlen=RECENT)

    def begin(
        self,
        work: int,
        dp_rank: int = 0,
        streamed: bool = True,
        *,
        one_of_many: bool = False,
        now: float | None = None,
    ) -> Attempt:
        """A request is sent; `work` tokens are to be computed before its first byte. `one_of_many`: the rank is."""
        if now is None:
            now = self.clock()
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
        """When the last byte of any answer came: now, if that was since the last time this was asked."""
        if self._heard:
            self._heard = False
            self._last_byte = self.clock()
        return self._last_byte

    def _begun(self, attempt: Attempt, now: float) -> None:
        if not self.attempts:
            self._last_byte, self._heard = now, False  # there was nothing to wait for
        self.attempts[attempt] = None

    def usable_ranks(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Those of a worker's ranks that requests may go to; all of them when none is left."""
        if not self.ranks:
            return ranks
        return tuple(r for r in ranks if r not in self.ranks or self.ranks[r].circuit.allows) or ranks

    def usable(self, dp_rank: int) -> bool:
        """Whether requests may go to a rank, without a look at the others."""
        return not self.ranks or dp_rank not in self.ranks or self.ranks[dp_rank].circuit.allows

    def in_flight(self) -> Counter[int]:
        """How many requests each rank has."""
        return Counter(attempt.dp_rank for attempt in self.attempts)

    @property
    def oldest_movable(self) -> Attempt | None:
        """The oldest request that waits for its first byte and may still go elsewhere."""
        return next((attempt for attempt in self.attempts if attempt.give_up is not None), None)

    @property
    def oldest_waiting(self) -> Attempt | None:
        """The oldest request that waits for its first byte."""
        return next((attempt for attempt in self.attempts if attempt.waits), None)

    def first_bytes(self) -> list[FirstByte]:
        """How long the last first bytes took."""
        since = self.clock() - RECENT_SECONDS
        return [seen for seen in self.last_first_bytes if seen.at > since]

    def results(self) -> list[Result]:
        """How the last requests ended."""
        since = self.clock() - RECENT_SECONDS
        return [result for result in self.last_results if result.at > since]

    def forget(self) -> None:
        """The worker was restarted, or is given another chance: what it did before counts no more."""
        self.last_results.clear()
        self.last_first_bytes.clear()
        self.ranks.clear()
        if self._on_change is not None:
            self._on_change()

    def give_up_waiting(self) -> int:
        """Have the requests sent elsewhere that may be; how many there are."""
        moved = 0
        for attempt in self.attempts:
            if attempt.give_up is not None:
                attempt.give_up()
                attempt.give_up = None
                moved += 1
        return moved

    def heard(self) -> None:
        """Bytes of an answer came. That does not read the clock."""
        self._heard = True
        if self.worker is not None:
            self.worker._heard = True

    def ended(self, attempt: Attempt, number: int, outcome: Outcome, reason: str, now: float) -> None:
        del self.attempts[attempt]
        if outcome is _NEITHER:
            self.circuit.ended(number)
            return
        failed = outcome is _FAILED
        if failed:
            self.circuit.failed(number, reason)
        else:
            self.circuit.succeeded(number)
        self.last_results.append(Result(failed, now))


class Attempt:
    """One request on one worker, from the choice to the end.

    `give_up` sends the request elsewhere. It is set while it waits for its first byte and can still be moved.
    `now`: the time by the health's clock, where it was just read.
    """

    def __init__(
        self, health: Health, number: int, of_worker: int, work: int, dp_rank: int, streamed: bool, now: float
    ) -> None:
        """`health`: of the rank that it is on, where its worker has several, else of the worker; `number`: its number
        there, and `of_worker` that at its worker."""
        self.begun = now
        self.work = work
        self.dp_rank = dp_rank
        self.streamed = streamed
        self.waits = True
        self.give_up: Callable[[], None] | None = None
        self.ended = self.failed = False
        self.health = health
        self._number = number
        self._of_worker = of_worker

    def waits_for_another(self) -> None:
        """Its first byte cannot come before another worker is done: until then its own is not judged by it."""
        self.waits = False

    def waits_from_now(self) -> None:
        """The other worker is done."""
        self.begun, self.waits = self.health.clock(), True

    def heard(self, now: float | None = None) -> None:
        """Bytes of the answer came."""
        health = self.health
        health.heard()
        if self.waits:
            self.waits = False
            if now is None:
                now = health.clock()
            seen = FirstByte(self.work, self.streamed, now - self.begun, now)
            health.last_first_bytes.append(seen)
            if health.worker is not None:
                health.worker.last_first_bytes.append(seen)

    def end(self, outcome: Outcome, reason: str = "", now: float | None = None) -> None:
        """The request ended. Only the first call counts."""
        if self.ended:
            return
        self.ended = True
        self.failed = outcome is _FAILED
        health = self.health
        if now is None:
            now = health.clock()
        if health.worker is not None:
            health.worker.ended(self, self._of_worker, outcome, reason, now)
        health.ended(self, self._number, outcome, reason, now)


def latest(of_each: Sequence[list[FirstByte]]) -> list[FirstByte]:
    """The latest first bytes of some workers: of thousands not all, but enough to know what is usual."""
    most = max(_ENOUGH // max(len(of_each), 1), 1)
    return [seen for some in of_each for seen in some[-most:]]


def expected_seconds(seen: Iterable[FirstByte], work: int, streamed: bool) -> float | None:
    """How long a first byte after `work` tokens takes at most, as a rule; None when nothing like it has been seen.

    Work that is larger than what was seen takes proportionally longer; smaller work may take as long. A tenth of what
    was seen may have been slow for reasons of its own.
    """
    scaled = sorted(first.seconds * max(1.0, work / first.work) for first in seen if first.streamed == streamed)
    return scaled[int(len(scaled) * 0.9)] if scaled else None


@dataclass(frozen=True, slots=True)
class StallLimits:
    """`silence`: seconds without a sign of life. `factor`: how many times longer than usual a first byte may take."""

    silence: float = 1.0
    factor: float = 3.0


def stalled(
    health: Health, limits: StallLimits, seen: Iterable[FirstByte], silent: float, unanswered: float
) -> str | None:
    """Why a worker counts as hung; None when it does not.

    `seen`: what first bytes take on it and on others like it. `silent`: seconds since the last sign of its work:
    bytes of an answer, an event, or counters that went on. `unanswered`: seconds that its metrics have been asked for.
    """
    if not health.attempts or silent < limits.silence:
        return None
    if unanswered >= limits.silence:
        return f"no sign of life for {min(silent, unanswered):.1f} s"
    return _late_first_byte(health, health.oldest_movable, limits, seen)


def rank_stalled(health: Health, limits: StallLimits, seen: Iterable[FirstByte], silent: float) -> str | None:
    """Why one rank of a worker counts as hung, while the worker itself answers; None when it does not."""
    if silent < limits.silence:
        return None
    return _late_first_byte(health, health.oldest_waiting, limits, seen)


def _late_first_byte(
    health: Health, oldest: Attempt | None, limits: StallLimits, seen: Iterable[FirstByte]
) -> str | None:
    if oldest is None:
        return None
    age = health.clock() - oldest.begun
    expected = expected_seconds(seen, oldest.work, oldest.streamed)
    if expected is not None and age >= max(limits.silence, limits.factor * expected):
        return f"no first byte for {age:.1f} s, where {expected:.2f} s are usual"
    return None
