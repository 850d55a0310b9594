"""A circuit breaker: whether a worker receives requests, from the outcomes of its last ones.

             failures in a row, or `open`
       CLOSED ─────────────────────────────▶ OPEN ◀──┐
          ▲                                   │      │ a failure: the backoff doubles
          │ a success                     ▼ backoff over
          └─────────────────────────────── HALF_OPEN ┘  one request at a time is allowed

The ends of requests that began before the circuit opened are ignored, because they do not show the worker's present
state.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class CircuitState(StrEnum):
    """The requests that are allowed: all, none, or one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class CircuitLimits:
    """The failures in a row that open a circuit, and the first and the longest backoff in seconds."""

    failures: int = 3
    backoff: float = 1.0
    longest_backoff: float = 30.0


class Circuit:
    """The circuit of one worker or rank. `begin` numbers the requests; each end is reported with its number.

    - `reason`: why it opened; None while it is closed.
    - `untroubled`: it is closed, and no request failed since one succeeded.
    """

    def __init__(
        self,
        limits: CircuitLimits,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """Create a closed circuit. `on_change` is called when it opens or closes."""
        self.closed = self.untroubled = True
        self.reason: str | None = None
        self._limits = limits
        self._on_change = on_change
        self._clock = clock
        self._begun = 0
        self._first_since_opening = 0
        self._failures = 0
        self._openings = 0
        self._opened_until = 0.0
        self._half_open_request: int | None = None

    @property
    def state(self) -> CircuitState:
        """The state now: an open circuit is half-open after its backoff."""
        if self.closed:
            return CircuitState.CLOSED
        return CircuitState.HALF_OPEN if self._clock() >= self._opened_until else CircuitState.OPEN

    @property
    def allows(self) -> bool:
        """True if a request may begin. A request that begins nevertheless counts like any other."""
        return self.closed or (self._half_open_request is None and self._clock() >= self._opened_until)

    @property
    def at_risk(self) -> bool:
        """True if it opens with the next failure, or is not closed."""
        return not self.closed or self._failures + 1 >= self._limits.failures

    def begin(self) -> int:
        """Record the begin of a request and return its number."""
        self._begun += 1
        if not self.closed and self.allows:
            self._half_open_request = self._begun
        return self._begun

    def succeeded(self, number: int) -> None:
        """Record that a request succeeded. The circuit closes."""
        if self.closed or number >= self._first_since_opening:
            self.close()

    def close(self) -> None:
        """Allow all requests, and forget all failures."""
        closes = not self.closed
        self.closed = self.untroubled = True
        self._failures = self._openings = 0
        self._half_open_request = self.reason = None
        if closes and self._on_change is not None:
            self._on_change()

    def failed(self, number: int, reason: str) -> None:
        """Record that a request failed because of the worker."""
        if not self.closed and number < self._first_since_opening:
            return
        self._failures += 1
        self.untroubled = False
        if not self.closed or self._failures >= self._limits.failures:
            self.open(reason)

    def ended(self, number: int) -> None:
        """Record that a request ended without showing whether the worker works."""
        if number == self._half_open_request:
            self._half_open_request = None

    def open(self, reason: str) -> None:
        """Allow no requests for a backoff. It is twice the last one, unless a request succeeded since."""
        backoff = min(self._limits.backoff * 2 ** min(self._openings, 30), self._limits.longest_backoff)
        self._openings += 1
        self.closed = self.untroubled = False
        self._opened_until = self._clock() + backoff
        self._failures = 0
        self._half_open_request = None
        self._first_since_opening = self._begun + 1
        self.reason = reason
        if self._on_change is not None:
            self._on_change()
