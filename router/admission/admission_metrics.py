"""The figures of the queue for Prometheus."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission.admission import Admission
from router.admission.waiting_request import WaitReason
from router.fleet.fleet import Fleet
from router.load.target_load import LoadTable

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Priorities are any integers, and labels must be few.
_CLASSES = ("high", "normal", "low")


def priority_class(priority: int) -> str:
    """Lower is sooner: `high` below 0, `low` above."""
    return _CLASSES[1 + (priority > 0) - (priority < 0)]


class AdmissionMetrics(Collector):
    """How many requests wait, how long they did, and how many were refused."""

    def __init__(self, admission: Admission, registry: CollectorRegistry) -> None:
        self._admission = admission
        self._waits = Histogram(
            "kvrouter_admission_wait_seconds",
            "How long requests were held before they were sent",
            ["reason"],
            registry=registry,
            buckets=_BUCKETS,
        )
        self._refusals = Counter(
            "kvrouter_admission_refused", "Requests refused instead of sent", ["reason"], registry=registry
        )
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        lengths = dict.fromkeys(_CLASSES, 0)
        for priority, waiting in self._admission.queue.lengths().items():
            lengths[priority_class(priority)] += waiting
        length = GaugeMetricFamily("kvrouter_admission_queue_length", "Requests that wait", labels=["priority"])
        for known, waiting in lengths.items():
            length.add_metric([known], waiting)
        size = GaugeMetricFamily("kvrouter_admission_queue_bytes", "The bodies of the requests that wait")
        size.add_metric([], self._admission.queue.size)
        yield from (length, size)

    def waited(self, reason: WaitReason, seconds: float) -> None:
        """Count a wait that ended with a place."""
        self._waits.labels(reason.value).observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a refusal."""
        self._refusals.labels(reason).inc()


class DemandCollector(Collector):
    """How many requests there are for each model, wherever they are: what the number of its workers may follow.

    Models are those of workers, those of the settings, and those that requests wait for. What is in flight counts for
    the first model of its worker.
    """

    def __init__(self, fleet: Fleet, load: LoadTable, admission: Admission) -> None:
        self._fleet = fleet
        self._load = load
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        requests: Count[str] = Count(dict.fromkeys(self._fleet.expected(), 0))
        for worker in self._fleet.workers:
            if models := sorted(worker.models()):
                in_flight = sum(self._load.of(worker.url, dp_rank).requests for dp_rank in worker.ranks())
                requests[models[0]] += in_flight
        for waiting in self._admission.queue.in_order():
            if waiting.name is not None:
                requests[self._fleet.model_of(waiting.name) or waiting.name] += 1
        demand = GaugeMetricFamily("kvrouter_model_demand", "Requests that wait or are in flight", labels=["model"])
        for model, count in requests.items():
            demand.add_metric([model], count)
        yield demand
