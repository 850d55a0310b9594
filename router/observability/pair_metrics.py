"""Metrics of the pairs of prefill and decode workers that requests are not sent to."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.routing.disaggregation.pair_rules import FORMAT, HANDSHAKE, REVISION, PairRules


class PairCollector(Collector):
    """The requests for which pairs were left out, and the barred pairs."""

    def __init__(self, pairs: PairRules) -> None:
        self._pairs = pairs

    def collect(self) -> Iterator[Metric]:
        left_out = CounterMetricFamily(
            "kvrouter_pairs_left_out", "Choices for which pairs of workers were left out", labels=["reason"]
        )
        for reason in (REVISION, HANDSHAKE, FORMAT):
            left_out.add_metric([reason], self._pairs.left_out[reason])
        yield left_out
        yield GaugeMetricFamily("kvrouter_pairs_barred", "Pairs that failed to connect", self._pairs.barred)
