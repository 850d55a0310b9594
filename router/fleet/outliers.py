"""Outliers: workers whose recent requests fail far more often, or start far later, than those of similar workers.

The search runs every second over thousands of workers. Therefore each worker is summarized once, and only conspicuous
workers are compared with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from router.fleet.health import FirstByte, Health, expected_seconds, latest


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

    - `errors`: the share that failed; None if they are too few.
    - `first_bytes`: the first bytes of streams.
    - `seconds`: the median time to them; 0 without any.
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
    """Return the median time that the first bytes `work` would take on the workers of `theirs`.

    It is the time of the median work, because the expected time never falls with the work.
    """
    tokens = sorted(seen.work for seen in work)
    middle = tokens[(len(tokens) - 1) // 2], tokens[len(tokens) // 2]
    return sum(expected_seconds(theirs, each, True) or 0.0 for each in middle) / 2
