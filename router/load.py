"""What the router itself has in flight on each target: reserved with the choice, released exactly once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class TargetLoad:
    """Requests in flight, their uncached tokens before the first byte, and the tokens they hold.

    `prefills` are the requests without a first byte, the oldest first, with the seconds each is expected to take.
    """

    requests: int = 0
    pending: int = 0
    context: int = 0
    clock: Callable[[], float] = field(default=time.monotonic, compare=False, repr=False)
    prefills: dict[Reservation, float] = field(default_factory=dict, compare=False, repr=False)
    head_since: float = field(default=0.0, compare=False, repr=False)

    @property
    def waiting(self) -> int:
        """Requests whose first byte has not come."""
        return len(self.prefills)

    @property
    def backlog(self) -> float:
        """Seconds until the prefills are expected to be done."""
        if not self.prefills:
            return 0.0
        return max(sum(self.prefills.values()) - (self.clock() - self.head_since), 0.0)


class Reservation:
    """One request's share of a target's load: its uncached tokens until the first byte, its tokens until the end.

    `release` may be called on every path; only the first counts. `prefill_seconds`: what its prefill is expected to
    take, where rates are known.
    """

    def __init__(self, load: TargetLoad, uncached: int, context: int, prefill_seconds: float = 0.0) -> None:
        self._load = load
        self._pending = uncached
        self._context = context
        self._held = True
        load.requests += 1
        load.pending += uncached
        load.context += context
        if not load.prefills:
            load.head_since = load.clock()
        load.prefills[self] = prefill_seconds

    def first_byte(self) -> None:
        """The prefill is done."""
        if self not in self._load.prefills:
            return
        self._load.pending -= self._pending
        if next(iter(self._load.prefills)) is self:
            self._load.head_since = self._load.clock()
        del self._load.prefills[self]

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

    def forget(self, worker: str) -> None:
        """A worker was removed. What it still has in flight is released all the same."""
        for known in [known for known in self._loads if known[0] == worker]:
            del self._loads[known]
