"""Metrics by OTLP over HTTP: server histograms by the conventions for generative AI, and kvrouter's own metrics.

OpenTelemetry's SDK reads its usual environment variables: `OTEL_METRICS_EXPORTER=otlp` switches the export on, and
`OTEL_EXPORTER_OTLP_ENDPOINT` and its like say where it is sent. `/metrics` has the own metrics as before.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from router.fleet.worker import Worker
from router.observability.gen_ai import GenAiMetrics, gen_ai_attributes

# Seconds, by Envoy AI Gateway: a duration, a time to first token, and a time per output token.
_DURATION: Final = tuple(0.01 * 2**power for power in range(14))
_FAST: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0)
_FIRST: Final = (*_FAST, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0)
_EACH: Final = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_EXPORT_TIMEOUT: Final = 5  # seconds, after which an export is dropped
_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE


class OtelMetrics(GenAiMetrics):
    """The histograms of requests, exported together with the own metrics of a registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        exporter = _ExporterWithOwn(registry)
        resource = Resource.create({SERVICE_NAME: "kvrouter"})
        self._provider = MeterProvider([PeriodicExportingMetricReader(exporter)], resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("kvrouter")
        self._duration = meter.create_histogram(
            "gen_ai.server.request.duration",
            "s",
            "Time from a complete request to the end of its answer",
            explicit_bucket_boundaries_advisory=_DURATION,
        )
        self._first = meter.create_histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time from a complete request to the first byte of its streamed answer",
            explicit_bucket_boundaries_advisory=_FIRST,
        )
        self._each = meter.create_histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per output token after the first one, of streams that report usage",
            explicit_bucket_boundaries_advisory=_EACH,
        )

    def ended(self, path: str, model: str | None, worker: Worker | None, seconds: float, error: str | None) -> None:
        if (attributes := gen_ai_attributes(path, model, worker, error)) is not None:
            self._duration.record(seconds, attributes)

    def first_token(self, path: str, model: str | None, worker: Worker, seconds: float) -> None:
        if (attributes := gen_ai_attributes(path, model, worker)) is not None:
            self._first.record(seconds, attributes)

    def output_tokens(self, path: str, model: str | None, worker: Worker, seconds: float) -> None:
        if (attributes := gen_ai_attributes(path, model, worker)) is not None:
            self._each.record(seconds, attributes)

    def stop(self) -> None:
        self._provider.shutdown(timeout_millis=_EXPORT_TIMEOUT * 1000)


class _ExporterWithOwn(OTLPMetricExporter):
    """An exporter that adds the metrics of a Prometheus registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(timeout=_EXPORT_TIMEOUT)
        self._registry = registry
        self._begun = time.time_ns()

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: object
    ) -> MetricExportResult:
        own = ScopeMetrics(InstrumentationScope("kvrouter.prometheus"), list(self._own(time.time_ns())), "")
        found = [
            ResourceMetrics(each.resource, [*each.scope_metrics, own], each.schema_url)
            for each in metrics_data.resource_metrics
        ]
        return super().export(MetricsData(found), timeout_millis, **kwargs)

    def _own(self, now: int) -> Iterator[Metric]:
        """Yield the metrics of the registry by their names in Prometheus."""
        for family in self._registry.collect():
            if family.type == "histogram":
                points = list(_histogram_points(family.samples, self._begun, now))
                yield Metric(family.name, family.documentation, "", Histogram(points, _CUMULATIVE))
                continue
            counts = family.type == "counter"
            samples = [each for each in family.samples if not each.name.endswith("_created")]
            numbers = [NumberDataPoint(each.labels, self._begun, now, each.value) for each in samples]
            name = f"{family.name}_total" if counts else family.name
            data = Sum(numbers, _CUMULATIVE, is_monotonic=True) if counts else Gauge(numbers)
            yield Metric(name, family.documentation, "", data)


def _histogram_points(samples: Iterable[Sample], begun: int, now: int) -> Iterator[HistogramDataPoint]:
    """Yield a histogram's data, with a count for each bucket, from Prometheus' cumulative samples."""
    found: dict[tuple[tuple[str, str], ...], dict[str, float]] = {}
    for each in samples:
        series = tuple(sorted(label for label in each.labels.items() if label[0] != "le"))
        kind = each.labels.get("le") or each.name.rpartition("_")[2]
        found.setdefault(series, {})[kind] = each.value
    for labels, values in found.items():
        total, count = values.pop("sum", 0.0), values.pop("count", 0.0)
        values.pop("created", None)
        bounds = sorted((float(bound), value) for bound, value in values.items())
        cumulative = [0.0, *(value for _, value in bounds)]
        counts = [int(after - before) for before, after in pairwise(cumulative)]
        edges = [bound for bound, _ in bounds[:-1]]
        used = [place for place, each in enumerate(counts) if each]
        # The bounds of the outer buckets: Prometheus keeps no least and no greatest value.
        least = edges[used[0] - 1] if used and used[0] else 0.0
        most = edges[min(used[-1], len(edges) - 1)] if used and edges else 0.0
        yield HistogramDataPoint(dict(labels), begun, now, int(count), total, counts, edges, least, most)
