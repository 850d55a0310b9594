"""What the router itself has in flight on each target: reserved with the choice, released exactly once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TargetLoad:
    """Requests in flight, their uncached tokens before the first byte, and the tokens they hold."""

    requests: int = 0
    pending: int = 0
    context: int = 0


class Reservation:
    """One request's share of a target's load: its uncached tokens until the first byte, its tokens until the end.

    `release` may be called on every path; only the first counts.
    """

    def __init__(self, load: TargetLoad, uncached: int, context: int) -> None:
        self._load = load
        self._pending = uncached
        self._context = context
        self._held = True
        load.requests += 1
        load.pending += uncached
        load.context += context

    def first_byte(self) -> None:
        """The prefill is done."""
        self._load.pending -= self._pending
        self._pending = 0

    def release(self) -> None:
        """The request ended, however it did."""
        if not self._held:
            return
        self._held = False
        self.first_byte()
        self._load.requests -= 1
        self._load.context -= self._context


class LoadTable:
    """The load of every DP rank of every worker, whatever model a request is for."""

    def __init__(self) -> None:
        self._loads: dict[tuple[str, int], TargetLoad] = {}

    def of(self, worker: str, dp_rank: int) -> TargetLoad:
        """A rank's load now."""
        return self._loads.setdefault((worker, dp_rank), TargetLoad())
