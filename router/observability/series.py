"""The time series of the page for the last quarter of an hour: hits, first bytes, failures, tokens, waiting requests.

All values are computed from the router's own metrics.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from router.cache_state.hit_audit import HitAudit
from router.observability.metrics import RequestMetrics

SECONDS = 2.0  # between points
KEPT = 450
# Values that are shown as rates per second.
_A_SECOND = ("requests", "errors", "refused", "retried", "prompt", "overlap", "generated")


class Series:
    """The time series. Each point covers the time between two calls of `sample`."""

    def __init__(
        self,
        metrics: RequestMetrics,
        audit: HitAudit,
        waiting: Callable[[], Mapping[Any, int]],
        seconds_per_token: Callable[[], float],
    ) -> None:
        """Create a series. `waiting`: by reason; `seconds_per_token`: the learned one of a prefill."""
        self.points: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._metrics = metrics
        self._audit = audit
        self._waiting = waiting
        self._seconds_per_token = seconds_per_token
        self._before = self._totals()
        self._buckets_before = metrics.first_byte.at_most()
        self._at = time.monotonic()

    def sample(self) -> None:
        """Add a point if one is due."""
        now = time.monotonic()
        if now - self._at < SECONDS:
            return
        totals, buckets = self._totals(), self._metrics.first_byte.at_most()
        # A total can fall when the series of a removed worker are dropped.
        passed = {name: max(totals[name] - self._before[name], 0.0) for name in totals}
        seconds = now - self._at
        rates = {name: round(passed[name] / seconds, 2) for name in _A_SECOND}
        times = {bound: float(buckets[bound] - self._buckets_before.get(bound, 0)) for bound in buckets}
        self.points.append(
            {
                "time": round(time.time(), 1),
                **rates,
                "saved": round(rates["overlap"] * self._seconds_per_token(), 3),
                "waiting": {str(reason): count for reason, count in self._waiting().items()},
                "predicted": _ratio(passed["overlap"], passed["prompt"]),
                "cached": _ratio(passed["cached"], passed["audited"]),
                "ttft_p50": percentile(times, 0.5),
                "ttft_p90": percentile(times, 0.9),
            }
        )
        self._before, self._buckets_before, self._at = totals, buckets, now

    def since(self, unix_time: float) -> list[dict[str, Any]]:
        """Return the points after a time."""
        return [point for point in self.points if point["time"] > unix_time]

    def _totals(self) -> dict[str, float]:
        audits = [audit for _, audit in self._audit.audits()]
        return {
            **self._metrics.failures(),
            "requests": self._metrics.decisions.total,
            "generated": self._metrics.completion_tokens.total,
            "prompt": self._metrics.prompt_tokens.total,
            "overlap": self._metrics.overlap_tokens.total,
            "audited": float(sum(audit.prompt_tokens for audit in audits)),
            "cached": float(sum(audit.cached_tokens for audit in audits)),
        }


def percentile(buckets: dict[float, float], share: float) -> float | None:
    """Return a percentile in seconds, between a histogram's bounds and their cumulative counts; None without values."""
    bounds = sorted(buckets)
    wanted = share * buckets[bounds[-1]] if bounds else 0.0
    if not wanted:
        return None
    below, before = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= wanted:
            if bound == float("inf"):
                return below
            return round(below + (bound - below) * (wanted - before) / (buckets[bound] - before), 4)
        below, before = bound, buckets[bound]
    return below


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None
