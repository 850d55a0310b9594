"""A circuit breaker: whether a worker gets requests, by how the last ones ended.

                failures in a row, or `open`
       CLOSED ─────────────────────────────▶ OPEN ◀──┐
          ▲                                   │      │ it fails: the backoff doubles
          │ it succeeds                   ▼ backoff over
          └─────────────────────────────── HALF_OPEN ┘  one request at a time is let through

Requests that began before the circuit opened say nothing about the worker afterwards, so their ends are ignored then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class CircuitState(StrEnum):
    """Whether requests are let through: all, none, or one at a time."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class CircuitLimits:
    """How many failures in a row open a circuit, and for how many seconds: at first, and at most."""

    failures: int = 3
    backoff: float = 1.0
    longest_backoff: float = 30.0


class Circuit:
    """The breaker of one worker. `begin` numbers the requests; each ends with its number."""

    def __init__(
        self,
        limits: CircuitLimits,
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[], None] | None = None,
    ) -> None:
        """`on_change` is called when the circuit opens or closes."""
        self.closed = True  # all requests are let through
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
        if self.closed:
            return CircuitState.CLOSED
        return CircuitState.HALF_OPEN if self._clock() >= self._opened_until else CircuitState.OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may begin. One that begins nevertheless counts as any other."""
        return self.closed or (self._half_open_request is None and self._clock() >= self._opened_until)

    def begin(self) -> int:
        """A request begins; its number."""
        self._begun += 1
        if not self.closed and self.allows:
            self._half_open_request = self._begun
        return self._begun

    def succeeded(self, number: int) -> None:
        """A request was answered well."""
        if self.closed or number >= self._first_since_opening:
            closes = not self.closed
            self.closed = True
            self._failures = self._openings = 0
            self._half_open_request = self.reason = None
            if closes and self._on_change is not None:
                self._on_change()

    def failed(self, number: int, reason: str) -> None:
        """A request failed through the worker's fault."""
        if not self.closed and number < self._first_since_opening:
            return
        self._failures += 1
        if not self.closed or self._failures >= self._limits.failures:
            self.open(reason)

    def ended(self, number: int) -> None:
        """A request ended in a way that says nothing about the worker."""
        if number == self._half_open_request:
            self._half_open_request = None

    def open(self, reason: str) -> None:
        """Let no request through for a while, twice as long as the last time unless one succeeded since."""
        backoff = min(self._limits.backoff * 2 ** min(self._openings, 30), self._limits.longest_backoff)
        self.closed = False
        self._opened_until = self._clock() + backoff
        self._openings += 1
        self._failures = 0
        self._half_open_request = None
        self._first_since_opening = self._begun + 1
        self.reason = reason
        if self._on_change is not None:
            self._on_change()
