"""Metrics under the names of llm-d's endpoint picker, for dashboards, alerts and autoscalers that read those.

Names and labels are those of llm-d-router's docs/metrics.md (August 2026), if this router has the value. They are made
from its own metrics when they are scraped. Labels without a value here (`fairness_id`, `priority`, `outcome`,
`streaming`) are left out, and so are the deprecated names.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.admission.admission import Admission
from router.admission.admission_metrics import in_flight_by_model
from router.admission.saturation import Saturation
from router.fleet.fleet import Fleet
from router.load.target_load import LoadTable
from router.observability.metrics import RequestMetrics

_PREFIX: Final = "llm_d_epp_"
_MODEL_LABELS: Final = ("model_name", "target_model_name")


class LlmDCollector(Collector):
    """The metrics of a router that llm-d's endpoint picker has, too. `pool`: the name of its InferencePool."""

    def __init__(
        self,
        requests: RequestMetrics,
        fleet: Fleet,
        load: LoadTable,
        admission: Admission,
        saturation: Saturation,
        pool: str,
    ) -> None:
        self._fleet = fleet
        self._load = load
        self._admission = admission
        self._saturation = saturation
        self._pool = pool
        self._decisions = requests.decisions
        self._of_model: dict[str, Collector] = {
            "request_ttft_seconds": requests.first_byte,
            "request_streaming_tpot_seconds": requests.token_time,
            "request_input_tokens": requests.input,
            "request_output_tokens": requests.output,
            "request_cached_tokens": requests.cached,
            "scheduler_e2e_duration_seconds": requests.choosing,
            "flow_control_request_queue_duration_seconds": requests.waiting,
            "prefix_indexer_hit_ratio": requests.hit_ratio,
        }

    def collect(self) -> Iterator[Metric]:
        for name, collector in self._of_model.items():
            for family in collector.collect():
                yield _renamed(family, _PREFIX + name)
        total = CounterMetricFamily(f"{_PREFIX}request", "Requests, by model", labels=_MODEL_LABELS)
        for model, count in self._decisions.by("model").items():
            total.add_metric([str(model)] * 2, count)
        yield total
        yield from self._pool_metrics()
        yield from self._queue_metrics()

    def _pool_metrics(self) -> Iterator[Metric]:
        queues, usages, in_flight = [], [], []
        ready = 0
        for worker in self._fleet.workers:
            ready += worker.up
            for dp_rank in worker.ranks():
                engine = worker.metrics.get(dp_rank)
                in_flight.append(self._load.of(worker.url, dp_rank).requests)
                if engine.queue is not None:
                    queues.append(engine.queue)
                if engine.kv_usage is not None:
                    usages.append(engine.kv_usage)
        of_models = GaugeMetricFamily(f"{_PREFIX}request_running", "Requests in flight", labels=_MODEL_LABELS)
        for model, count in in_flight_by_model(self._fleet, self._load).items():
            of_models.add_metric([model] * 2, count)
        yield of_models
        yield self._gauge("ready_endpoints", "Workers that get requests", ready)
        for name, text, values in (
            ("average_kv_cache_utilization", "Mean share of KV memory in use, as engines report it", usages),
            ("average_queue_size", "Mean requests that wait in an engine", queues),
            ("average_running_requests", "Mean requests in flight", in_flight),
        ):
            if values:
                yield self._gauge(name, text, fmean(values))

    def _queue_metrics(self) -> Iterator[Metric]:
        queue = self._admission.queue
        yield self._gauge("flow_control_queue_size", "Waiting requests", queue.length, "inference_pool")
        yield self._gauge("flow_control_queue_bytes", "Bodies of waiting requests", queue.size, "inference_pool")
        stages: dict[str, float] = {}
        for stage in self._saturation.stages():
            if stage.causes:
                # A worker that does both is in llm-d's stage decode.
                name = "prefill" if stage.stage == "prefill" else "decode"
                stages[name] = max(stages.get(name, 0.0), stage.causes[stage.cause])
        if stages:
            stages["effective"] = max(stages.values())
        saturation = GaugeMetricFamily(
            f"{_PREFIX}flow_control_pool_saturation", "Share in use", labels=["inference_pool", "stage"]
        )
        for name, share in stages.items():
            saturation.add_metric([self._pool, name], share)
        yield saturation

    def _gauge(self, name: str, documentation: str, value: float, label: str = "name") -> Metric:
        gauge = GaugeMetricFamily(_PREFIX + name, documentation, labels=[label])
        gauge.add_metric([self._pool], value)
        return gauge


def _renamed(family: Metric, name: str) -> Metric:
    """Return a family of series by `model` under another name, with llm-d's labels."""
    renamed = Metric(name, family.documentation, family.type)
    for sample in family.samples:
        others = {label: value for label, value in sample.labels.items() if label != "model"}
        labels = dict.fromkeys(_MODEL_LABELS, sample.labels["model"]) | others
        renamed.add_sample(name + sample.name.removeprefix(family.name), labels, sample.value)
    return renamed
