"""The router's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.fleet import Fleet
from router.load import LoadTable

_FIRST_BYTE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class RequestMetrics:
    """What became of requests. Models are names that workers serve, so label sets stay bounded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.answered = Counter(
            "kvrouter_requests", "Requests answered by workers", ["model", "worker", "status"], registry=registry
        )
        self.refused = Counter(
            "kvrouter_requests_refused", "Requests the router refused", ["status"], registry=registry
        )
        self.retried = Counter(
            "kvrouter_requests_retried", "Attempts that went elsewhere", ["worker"], registry=registry
        )
        self.abandoned = Counter("kvrouter_requests_abandoned", "Requests left by their client", registry=registry)
        self.broken = Counter(
            "kvrouter_answers_broken", "Answers that a worker did not finish", ["worker"], registry=registry
        )
        self.prompt_tokens = Counter("kvrouter_prompt_tokens", "Tokens of routed prompts", ["model"], registry=registry)
        self.overlap_tokens = Counter(
            "kvrouter_overlap_tokens", "Tokens expected to come from the worker's cache", ["model"], registry=registry
        )
        self.first_byte = Histogram(
            "kvrouter_time_to_first_byte_seconds",
            "From the end of a request's body to the first byte of its answer's",
            ["model"],
            registry=registry,
            buckets=_FIRST_BYTE_BUCKETS,
        )


class FleetCollector(Collector):
    """The workers and what is in flight on them, read when asked for."""

    def __init__(self, fleet: Fleet, load: LoadTable) -> None:
        self._fleet = fleet
        self._load = load

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvrouter_worker_up", "1 while a worker is used", labels=["worker"])
        labels = ["worker", "dp_rank"]
        requests = GaugeMetricFamily("kvrouter_requests_in_flight", "Requests in flight", labels=labels)
        pending = GaugeMetricFamily("kvrouter_prefill_tokens_in_flight", "Uncached tokens to prefill", labels=labels)
        for worker in self._fleet.workers:
            up.add_metric([worker.url], float(worker.up))
            for dp_rank in worker.ranks():
                load = self._load.of(worker.url, dp_rank)
                requests.add_metric([worker.url, str(dp_rank)], load.requests)
                pending.add_metric([worker.url, str(dp_rank)], load.pending)
        yield from (up, requests, pending)
