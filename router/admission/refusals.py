"""The refusals of requests that cannot be sent to a worker: their errors, and when clients should retry."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from http_api.errors import RequestError
from router.admission.ticket import Ticket, deadline_error
from router.prediction.slo import SLO, Prediction
from router.routing.target_directory import unavailable

_RATE_SECONDS = 30.0
_LONGEST_RETRY = 60


class AdmissionRate:
    """The rate at which requests are placed, by priority, over the last `window` seconds.

    - `longest`: the longest wait that it returns, in seconds.
    """

    def __init__(
        self, clock: Callable[[], float], window: float = _RATE_SECONDS, longest: int = _LONGEST_RETRY
    ) -> None:
        self._clock = clock
        self._window = window
        self._longest = longest
        self._placed: deque[tuple[int, dict[int, int]]] = deque(maxlen=int(window))  # a second, by priority

    def count(self, priority: int) -> None:
        """Count a request that is placed now."""
        second = int(self._clock())
        if not self._placed or self._placed[-1][0] != second:
            self._placed.append((second, {}))
        placed = self._placed[-1][1]
        placed[priority] = placed.get(priority, 0) + 1

    def seconds_for(self, priority: int, ahead: int, otherwise: float) -> int:
        """Return the whole seconds, from 1 to `longest`, after which a request would be placed behind `ahead` others.

        Requests of a higher priority keep their part of the places: only the others count. If these were all of a
        higher priority, a request waits longest. `otherwise`: the seconds until any request was placed.
        """
        now = self._clock()
        recent = [each for each in self._placed if each[0] > now - self._window]
        if not recent:
            return _retry_after(otherwise, self._longest)
        places = sum(count for _, placed in recent for known, count in placed.items() if known >= priority)
        seconds = max(now - recent[0][0], 1.0)
        return _retry_after((ahead + 1) * seconds / places, self._longest) if places else self._longest


class Refusals:
    """Counts the requests that are refused, and makes their errors. The caller raises them."""

    def __init__(self, timeout: float, clock: Callable[[], float]) -> None:
        """Create the refusals of one queue. `timeout`: the seconds that a request may wait in it."""
        self.on_refused: list[Callable[[str], None]] = []
        self.on_slo_refused: list[Callable[[str, SLO], None]] = []
        self.rate = AdmissionRate(clock)
        self._timeout = timeout

    def count(self, reason: str) -> None:
        for on_refused in self.on_refused:
            on_refused(reason)

    def deadline(self) -> RequestError:
        """Return the error of a request whose deadline has passed: 504."""
        self.count("deadline")
        return deadline_error()

    def no_worker(self, name: str | None) -> RequestError:
        """Return the error of a request whose model has no worker: 503."""
        self.count("no_worker")
        return unavailable(f"No worker serves model {name!r} now, and the request cannot wait longer for one.")

    def stopping(self) -> RequestError:
        """Return the error of a request that still waits when the router stops: 503."""
        self.count("stopping")
        return RequestError(
            "The router stops, and no worker had room for the request. Send it again: another router may answer it.",
            status=503,
            type="service_unavailable",
            code="stopping",
            retry_after=1,
        )

    def slo_missed(self, slo: SLO, model: str, seconds: float, prediction: Prediction | None) -> RequestError:
        """Return the error (429) of a request whose SLO the best candidate misses by `seconds`."""
        self.count("slo_not_met")
        self._count_slo(model, slo)
        retry_after = _retry_after(seconds)
        expected = ""
        if prediction is not None:
            ttft, tpot = prediction.ttft.expected, prediction.tpot.expected
            expected = f"; {ttft:.2f} s and {1000 * tpot:.0f} ms are expected now"
        return RequestError(
            f"No worker can meet the SLO, {slo.in_words}{expected}. Try again in {retry_after} s.",
            status=429,
            type="rate_limit_error",
            code="slo_not_met",
            retry_after=retry_after,
        )

    def too_many(self, code: str, name: str | None, ticket: Ticket, waiting: int, ahead: int) -> RequestError:
        """Return the error (429) for a full queue or a long wait. `ahead`: waiting requests that are served first."""
        slo = ticket.slo
        self.count(code)
        if slo is not None:
            self._count_slo(name or "", slo)
        retry_after = self.rate.seconds_for(ticket.priority, ahead, otherwise=self._timeout)
        return RequestError(
            f"All workers are busy, and {waiting} requests wait. Try again in {retry_after} s.",
            status=429,
            type="rate_limit_error",
            code=code,
            retry_after=retry_after,
        )

    def no_room(self, name: str | None, slo: SLO | None, waiting: int, retry_after: int) -> RequestError:
        """Return the error (429) of a new session that found no room. `waiting`: the calls that wait for room."""
        self.count("working_set")
        if slo is not None:
            self._count_slo(name or "", slo)
        return RequestError(
            "The contexts of live sessions fill the KV caches of the fleet, and this call would begin a new session. "
            f"{waiting} calls wait for room. Try again in {retry_after} s.",
            status=429,
            type="rate_limit_error",
            code="working_set",
            retry_after=retry_after,
        )

    def _count_slo(self, model: str, slo: SLO) -> None:
        for on_slo_refused in self.on_slo_refused:
            on_slo_refused(model, slo)


def _retry_after(seconds: float, longest: int = _LONGEST_RETRY) -> int:
    return min(max(math.ceil(seconds), 1), longest)
