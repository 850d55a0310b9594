"""A sample of the placed requests with their decisions, for the live page."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from indexer.targets import WorkerNames
from router.apis.usage import Usage
from router.observability.hot_prefixes import HotPrefixes
from router.policies import Decision
from router.routing.assignment import Assignment
from router.routing.prompt_reader import RoutedPrompt

PER_SECOND = 20
KEPT = 256


@dataclass(slots=True, eq=False)
class SeenRequest:
    """One sampled request. `changed` is the number of its last change; times are in seconds of `clock`."""

    number: int
    model: str
    tokens: int
    decision: dict[str, Any]
    placed_at: float
    unix_time: float
    clock: Callable[[], float]
    changes: count[int]
    changed: int = 0
    first_byte_ms: float | None = None
    whole_ms: float | None = None
    usage: Usage | None = None

    def first_byte(self) -> None:
        """Record the first byte of the response."""
        if self.first_byte_ms is None:
            self.first_byte_ms = self._passed()
            self.changed = next(self.changes)

    def answered(self, usage: Usage | None) -> None:
        """Record the usage of a complete response."""
        self.usage = usage

    def ended(self, failed: bool = False) -> None:  # noqa: ARG002 - a `ReleaseCallback`
        """Record the end of the request, whatever its outcome."""
        self.whole_ms = self._passed()
        self.changed = next(self.changes)

    def as_json(self) -> dict[str, Any]:
        """Return the request's record."""
        return {
            "number": self.number,
            "time": self.unix_time,
            "model": self.model,
            "tokens": self.tokens,
            **self.decision,
            "first_byte_ms": self.first_byte_ms,
            "whole_ms": self.whole_ms,
            "cached": self.usage.cached if self.usage else None,
            "completion": self.usage.completion if self.usage else None,
        }

    def _passed(self) -> float:
        return round((self.clock() - self.placed_at) * 1000, 1)


@dataclass(slots=True)
class SeenRequests:
    """The last `KEPT` sampled requests, at most `PER_SECOND` per second; `names` has the names of workers."""

    clock: Callable[[], float] = time.monotonic
    names: WorkerNames = field(default_factory=WorkerNames)
    _seen: deque[SeenRequest] = field(default_factory=lambda: deque(maxlen=KEPT))
    _changes: count[int] = field(default_factory=lambda: count(1))
    _numbers: count[int] = field(default_factory=lambda: count(1))
    due: float = 0.0  # requests before this time are not sampled

    def placed(self, model: str | None, tokens: int, decision: Decision) -> SeenRequest | None:
        """Return the record of a placed request; None if it is not sampled."""
        now = self.clock()
        if now < self.due:
            return None
        self.due = now + 1 / PER_SECOND
        costs = _costs_of(decision, self.names)
        seen = SeenRequest(next(self._numbers), model or "", tokens, costs, now, time.time(), self.clock, self._changes)
        seen.changed = next(self._changes)
        self._seen.append(seen)
        return seen

    def since(self, change: int) -> list[SeenRequest]:
        """Return the requests that changed after a change number, the oldest first."""
        return [seen for seen in self._seen if seen.changed > change]


class SampledTraffic:
    """A sample of the placed requests, and the prefixes that they share: a `RequestSampler`."""

    def __init__(self, names: WorkerNames) -> None:
        """Create an empty sample. `names`: the names of workers on the page."""
        self.requests = SeenRequests(names=names)
        self.prefixes = HotPrefixes(names=names)

    @property
    def due(self) -> float:
        """The time from which the next placed request is sampled, in seconds of `time.monotonic`."""
        return self.requests.due

    def placed(self, prompt: RoutedPrompt, assignment: Assignment) -> SeenRequest | None:
        """Return the record of a request that was just placed; None if it is not sampled."""
        seen = self.requests.placed(prompt.name, prompt.tokens, assignment.decision)
        if seen is not None:
            assignment.when_released(seen.ended)
            hashes = assignment.cache_prediction.hashes if assignment.cache_prediction else []
            if hashes and hashes[0]:
                self.prefixes.seen(hashes[0], [each for each in assignment.decision.candidates if each.overlap])
        return seen


def _costs_of(decision: Decision, names: WorkerNames) -> dict[str, Any]:
    chosen = decision.chosen
    return {
        "worker": names.get(chosen.target.worker),
        "dp_rank": chosen.target.dp_rank,
        "overlap": chosen.overlap,
        "best_overlap": max(candidate.overlap for candidate in decision.candidates),
        "candidates": decision.count,
        "unit": decision.unit,
        "terms": {name: float(f"{amount:.4g}") for name, amount in decision.terms(chosen).items()},
    }
