"""The figures of the queue for Prometheus."""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission.admission import Admission
from router.admission.ticket import WaitReason
from router.fleet.fleet import Fleet
from router.load.target_load import LoadTable

_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
# Labels for priorities, because a label for each integer would make too many series.
_CLASSES = ("high", "normal", "low")


def priority_class(priority: int) -> str:
    """Return the class of a priority: `high` below 0, `normal` at 0, `low` above 0."""
    return _CLASSES[1 + (priority > 0) - (priority < 0)]


class AdmissionMetrics(Collector):
    """The waiting requests, the durations of their waits, and the refused requests."""

    def __init__(self, admission: Admission, registry: CollectorRegistry) -> None:
        self._admission = admission
        self._waits = Histogram(
            "kvrouter_admission_wait_seconds",
            "Seconds for which requests waited in the queue before they were sent",
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
        length = GaugeMetricFamily(
            "kvrouter_admission_queue_length", "Requests that wait in the queue", labels=["priority"]
        )
        for known, waiting in lengths.items():
            length.add_metric([known], waiting)
        size = GaugeMetricFamily("kvrouter_admission_queue_bytes", "Bytes of the bodies of waiting requests")
        size.add_metric([], self._admission.queue.size)
        yield from (length, size)

    def waited(self, reason: WaitReason, seconds: float) -> None:
        """Count a wait that ended with a place."""
        self._waits.labels(reason.value).observe(seconds)

    def refused(self, reason: str) -> None:
        """Count a refusal."""
        self._refusals.labels(reason).inc()


def in_flight_by_model(fleet: Fleet, load: LoadTable) -> Count[str]:
    """Return the requests in flight by the first model of their worker."""
    requests: Count[str] = Count()
    for worker in fleet.workers:
        if models := sorted(worker.models()):
            requests[models[0]] += sum(load.of(worker.url, dp_rank).requests for dp_rank in worker.ranks())
    return requests


class DemandCollector(Collector):
    """The requests for each model, waiting and in flight, by which its workers can be scaled.

    Requests in flight count for the first model of their worker.
    """

    def __init__(self, fleet: Fleet, load: LoadTable, admission: Admission) -> None:
        self._fleet = fleet
        self._load = load
        self._admission = admission

    def collect(self) -> Iterator[Metric]:
        requests: Count[str] = Count(dict.fromkeys(self._fleet.expected(), 0))
        requests.update(in_flight_by_model(self._fleet, self._load))
        for waiting in self._admission.queue.in_order():
            if waiting.name is not None:
                requests[self._fleet.model_of(waiting.name) or waiting.name] += 1
        demand = GaugeMetricFamily("kvrouter_model_demand", "Requests that wait or are in flight", labels=["model"])
        for model, count in requests.items():
            demand.add_metric([model], count)
        yield demand
