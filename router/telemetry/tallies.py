"""Figures for Prometheus that every request counts in: plain numbers, made into series when they are asked for.

Those of prometheus_client take a lock each time, and cost more than the choice of a worker. These are counted by the
event loop alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str | int, ...]


class Tally(Collector):
    """A counter."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._amounts: dict[Labels, float] = {}
        registry.register(self)

    def add(self, amount: float, *labels: str | int) -> None:
        """Count an amount, under a value for each label."""
        amounts = self._amounts
        amounts[labels] = amounts.get(labels, 0) + amount

    @property
    def total(self) -> float:
        """The sum of all series."""
        return sum(self._amounts.values())

    def forget(self, value: str) -> None:
        """End the series that have this value for any label."""
        for labels in [labels for labels in self._amounts if value in labels]:
            del self._amounts[labels]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._labels)
        for labels, amount in list(self._amounts.items()):
            family.add_metric([str(label) for label in labels], amount)
        yield family


class Spread(Collector):
    """A histogram with these upper bounds, and one more for all that is larger."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        bounds: Sequence[float],
    ) -> None:
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._bounds = bounds
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        registry.register(self)

    def observe(self, value: float, *labels: str | int) -> None:
        """Count a value, under a value for each label."""
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * (len(self._bounds) + 1)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def at_most(self) -> dict[float, int]:
        """By upper bound, how many values of all series were at most so large. Empty before the first."""
        columns = zip(*self._counts.values(), strict=True)
        return dict(zip((*self._bounds, float("inf")), accumulate(map(sum, columns)), strict=False))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._labels)
        names = [*map(str, self._bounds), "+Inf"]
        for labels, counts in list(self._counts.items()):
            buckets = list(zip(names, map(float, accumulate(counts)), strict=True))
            family.add_metric([str(label) for label in labels], buckets, self._sums[labels])
        yield family
