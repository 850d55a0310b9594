"""How sharing load goes, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.fleet.fleet import Fleet
from router.sharing.sharing import LoadSharing


class SharingCollector(Collector):
    """The carriers, the other routers, and what they have in flight, read when asked for."""

    def __init__(self, sharing: LoadSharing, fleet: Fleet) -> None:
        self._sharing = sharing
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvrouter_sharing_up", "1 while load is shared over a carrier", labels=["carrier"])
        for carrier in self._sharing.carriers:
            up.add_metric([carrier.name], float(carrier.problem is None))
        elsewhere = self._sharing.elsewhere
        routers = GaugeMetricFamily("kvrouter_sharing_routers", "Other routers heard of", len(elsewhere.routers()))
        labels = ["worker", "dp_rank"]
        requests = GaugeMetricFamily("kvrouter_requests_elsewhere", "In flight from other routers", labels=labels)
        for worker in self._fleet.workers:
            for dp_rank in worker.ranks():
                requests.add_metric([worker.url, str(dp_rank)], elsewhere.of(worker.url, dp_rank).requests)
        yield from (up, routers, requests)
