"""Metrics of the pairs of prefill and decode workers that requests are not sent to."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.routing.disaggregation.pair_rules import FORMAT, HANDSHAKE, REVISION, PairRules


class PairCollector(Collector):
    """The requests for which pairs were excluded, and the barred pairs."""

    def __init__(self, pairs: PairRules) -> None:
        self._pairs = pairs

    def collect(self) -> Iterator[Metric]:
        excluded = CounterMetricFamily(
            "kvrouter_pairs_excluded", "Choices for which pairs of workers were excluded", labels=["reason"]
        )
        for reason in (REVISION, HANDSHAKE, FORMAT):
            excluded.add_metric([reason], self._pairs.excluded[reason])
        yield excluded
        yield GaugeMetricFamily("kvrouter_pairs_barred", "Pairs that failed to connect", self._pairs.barred)
