"""Counters and histograms for metrics that every request updates: plain numbers, converted when they are scraped.

prometheus_client takes a lock for each update, which costs more than the choice of a worker. These metrics are updated
only on the event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

Labels = tuple[str | int, ...]


class CounterSeries:
    """One series of a counter. To count, add to `amount`."""

    __slots__ = ("amount",)

    def __init__(self) -> None:
        self.amount = 0.0


class Counter(Collector):
    """A counter."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._label_names = labels
        self._counts: dict[Labels, CounterSeries] = {}
        registry.register(self)

    def labels(self, *labels: str | int) -> CounterSeries:
        """Return the series with these label values."""
        count = self._counts.get(labels)
        if count is None:
            count = self._counts[labels] = CounterSeries()
        return count

    @property
    def total(self) -> float:
        """The sum of all series."""
        return sum(count.amount for count in self._counts.values())

    def by(self, label: str) -> dict[str | int, float]:
        """Return the sums of the series by the values of a label."""
        place = self._label_names.index(label)
        sums: dict[str | int, float] = {}
        for labels, count in self._counts.items():
            sums[labels[place]] = sums.get(labels[place], 0.0) + count.amount
        return sums

    def forget(self, value: str) -> None:
        """Drop the series that have this value for any label. Later updates of dropped series are lost."""
        for labels in [labels for labels in self._counts if value in labels]:
            del self._counts[labels]

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._documentation, labels=self._label_names)
        for labels, count in list(self._counts.items()):
            family.add_metric([str(label) for label in labels], count.amount)
        yield family


class HistogramSeries:
    """One series of a histogram: the number of values per bucket."""

    __slots__ = ("_lowest", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._lowest = bounds[0]
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        # Most values are small; compiled code then skips the search.
        self.counts[0 if value <= self._lowest else bisect_left(self.bounds, value)] += 1
        self.sum += value


class Histogram(Collector):
    """A histogram with these upper bounds, and one bucket for larger values."""

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
        self._label_names = labels
        self._bounds = bounds
        self._series: dict[Labels, HistogramSeries] = {}
        registry.register(self)

    def labels(self, *labels: str | int) -> HistogramSeries:
        """Return the series with these label values."""
        series = self._series.get(labels)
        if series is None:
            series = self._series[labels] = HistogramSeries(self._bounds)
        return series

    def at_most(self) -> dict[float, int]:
        """Return the number of values of all series up to each bound; empty before the first value."""
        columns = zip(*(series.counts for series in self._series.values()), strict=True)
        return dict(zip((*self._bounds, float("inf")), accumulate(map(sum, columns)), strict=False))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=self._label_names)
        names = [*map(str, self._bounds), "+Inf"]
        for labels, series in list(self._series.items()):
            buckets = list(zip(names, map(float, accumulate(series.counts)), strict=True))
            family.add_metric([str(label) for label in labels], buckets, series.sum)
        yield family
