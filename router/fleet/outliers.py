"""Workers that are far worse than the others that serve the same, by how their last requests went.

There may be thousands, and they are looked at every second: what is asked of each is found once, and one is compared
with the others only where it stands out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from router.fleet.health import FirstByte, Health, expected_seconds, latest


@dataclass(frozen=True, slots=True)
class OutlierLimits:
    """`factor`: how many times slower than the others; `errors`: which share of failures beyond theirs; `samples`: how
    many results it takes to say so; `seconds`: differences below this are none."""

    factor: float = 5.0
    errors: float = 0.3
    samples: int = 10
    seconds: float = 0.5


class Recent:
    """How a worker's last requests went.

    `errors`: the share that failed, where there were enough. `first_bytes`: those of streams; `seconds`: the
    median of what they took, 0 where there were none.
    """

    def __init__(self, health: Health, limits: OutlierLimits) -> None:
        results = health.results()
        failed = sum(result.failed for result in results)
        self.errors = failed / len(results) if len(results) >= limits.samples else None
        self.first_bytes = [seen for seen in health.first_bytes() if seen.streamed]
        self.seconds = median([seen.seconds for seen in self.first_bytes]) if self.first_bytes else 0.0


class Alike:
    """Workers that serve the same."""

    def __init__(self, workers: Sequence[Recent], limits: OutlierLimits) -> None:
        self._workers = workers
        self._limits = limits
        # At least half of them take so long: who is far slower than is usual is far slower than this.
        known = [worker.seconds for worker in workers if worker.first_bytes]
        self._typical = median_low(known) if known else 0.0

    def outlier(self, worker: Recent) -> str | None:
        """In what one of them is far worse than the others; None when it is not."""
        return self._fails(worker) or self._is_late(worker)

    def _fails(self, worker: Recent) -> str | None:
        if worker.errors is None or worker.errors <= self._limits.errors:
            return None
        errors = [other.errors for other in self._workers if other is not worker and other.errors is not None]
        if not errors or worker.errors <= median(errors) + self._limits.errors:
            return None
        return f"{worker.errors:.0%} of its requests fail, {median(errors):.0%} of the others'"

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
    """The median of what such work takes where `theirs` were seen: what the median of the work takes, since more work
    never takes less."""
    tokens = sorted(seen.work for seen in work)
    middle = tokens[(len(tokens) - 1) // 2], tokens[len(tokens) // 2]
    return sum(expected_seconds(theirs, each, True) or 0.0 for each in middle) / 2
