"""How sharing load goes, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.fleet.fleet import Fleet
from router.sharing.sharing import LoadSharing


class SharingCollector(Collector):
    """The channels, the other routers, and what they have in flight, read when asked for."""

    def __init__(self, sharing: LoadSharing, fleet: Fleet) -> None:
        self._sharing = sharing
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvrouter_sharing_up", "1 while load is shared over a carrier", labels=["carrier"])
        for channel in self._sharing.channels:
            up.add_metric([channel.name], float(channel.problem is None))
        peer_load = self._sharing.peer_load
        routers = GaugeMetricFamily("kvrouter_sharing_routers", "Other routers heard of", len(peer_load.routers()))
        labels = ["worker", "dp_rank"]
        requests = GaugeMetricFamily("kvrouter_requests_elsewhere", "In flight from other routers", labels=labels)
        for worker in self._fleet.workers:
            for dp_rank in worker.ranks():
                requests.add_metric([worker.name, str(dp_rank)], peer_load.of(worker.url, dp_rank).requests)
        yield from (up, routers, requests)
