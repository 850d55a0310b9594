"""The router's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.apis.usage import Usage
from router.cache_state.hit_audit import Basis, CachePrediction, HitAudit
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker, WorkerState
from router.load.target_load import LoadTable
from router.observability.counters import Counter, CounterSeries, Histogram
from router.policies import Decision
from router.policies.records import CostUnit

_SHORT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_FIRST_BYTE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# Names of models that have series of their own, and what all others are counted as: a worker may serve another name
# whenever it is asked.
MOST_MODELS = 1024
OTHER_MODELS = "other"


class _OfModel:
    """The series of one model, so that no request looks them up."""

    __slots__ = (
        "best_overlap_tokens",
        "completion_tokens",
        "costs",
        "decisions",
        "first_byte",
        "model",
        "overlap_tokens",
        "prompt_tokens",
        "queue",
    )

    def __init__(self, model: str, metrics: RequestMetrics) -> None:
        self.model = model
        self.queue = metrics.queue.of(model)
        self.first_byte = metrics.first_byte.of(model)
        self.decisions = metrics.decisions.of(model)
        self.prompt_tokens = metrics.prompt_tokens.of(model)
        self.overlap_tokens = metrics.overlap_tokens.of(model)
        self.best_overlap_tokens = metrics.best_overlap_tokens.of(model)
        self.completion_tokens = metrics.completion_tokens.of(model)
        self.costs: dict[CostUnit, dict[str, CounterSeries]] = {}  # by unit and term


class RequestMetrics:
    """What became of requests. Models are names that workers serve, and not too many, so label sets stay bounded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.refused = prometheus_client.Counter(
            "kvrouter_requests_refused", "Requests the router refused", ["status"], registry=registry
        )
        self.retried = prometheus_client.Counter(
            "kvrouter_requests_retried", "Attempts that went elsewhere", ["worker"], registry=registry
        )
        self.of_tenant = prometheus_client.Counter(
            "kvrouter_tenant_requests", "Requests of each tenant", ["tenant", "status"], registry=registry
        )
        self.abandoned = prometheus_client.Counter(
            "kvrouter_requests_abandoned", "Requests left by their client", registry=registry
        )
        self.broken = prometheus_client.Counter(
            "kvrouter_answers_broken", "Answers that a worker did not finish", ["worker"], registry=registry
        )
        # Those that every request counts in.
        self.answered = Counter(
            "kvrouter_requests", "Requests answered by workers", ["model", "worker", "status"], registry
        )
        self.prompt_tokens = Counter("kvrouter_prompt_tokens", "Tokens of routed prompts", ["model"], registry)
        self.overlap_tokens = Counter(
            "kvrouter_overlap_tokens", "Tokens expected to come from the worker's cache", ["model"], registry
        )
        self.best_overlap_tokens = Counter(
            "kvrouter_best_overlap_tokens", "The most that any worker's cache had", ["model"], registry
        )
        self.completion_tokens = Counter(
            "kvrouter_completion_tokens", "Tokens generated, as engines reported them", ["model"], registry
        )
        self.decisions = Counter("kvrouter_decisions", "Choices of a worker", ["model"], registry)
        self.cost = Counter(
            "kvrouter_decision_cost", "Cost of what was chosen, by term", ["model", "term", "unit"], registry
        )
        self.queue = Histogram(
            "kvrouter_queue_seconds",
            "From the end of a request's body to its sending to a worker",
            ["model"],
            registry,
            _SHORT_BUCKETS,
        )
        self.first_byte = Histogram(
            "kvrouter_time_to_first_byte_seconds",
            "From the end of a request's body to the first byte of its answer's",
            ["model"],
            registry,
            _FIRST_BYTE_BUCKETS,
        )
        self.token_time = Histogram(
            "kvrouter_time_per_output_token_seconds",
            "From the first byte of a stream to its last, for each token after the first",
            ["model"],
            registry,
            _SHORT_BUCKETS,
        )
        self._of_models: dict[str, _OfModel] = {}

    def _of(self, model: str) -> _OfModel:
        if len(self._of_models) >= MOST_MODELS:
            model = OTHER_MODELS
            if model in self._of_models:
                return self._of_models[model]
        of_model = self._of_models[model] = _OfModel(model, self)
        return of_model

    def placed(self, model: str, waited: float, decision: Decision, cache_prediction: CachePrediction | None) -> None:
        """A worker was chosen, `waited` seconds after the request was complete. `prediction`: where its prompt was
        looked for in the caches."""
        of_model = self._of_models.get(model) or self._of(model)
        of_model.queue.observe(waited)
        of_model.decisions.amount += 1
        if cache_prediction is not None:
            of_model.best_overlap_tokens.amount += cache_prediction.most
        if decision.free:
            return
        unit = decision.unit
        costs = of_model.costs.get(unit)
        if costs is None:
            costs = of_model.costs[unit] = {}
        for term, amount in decision.terms(decision.chosen).items():
            if amount:
                cost = costs.get(term)
                if cost is None:
                    cost = costs[term] = self.cost.of(of_model.model, term, unit.value)
                cost.amount += amount

    def begun(self, model: str, worker: str, status: int, tokens: int, overlap: int) -> None:
        """A worker answers a prompt of this many tokens."""
        of_model = self._of_models.get(model) or self._of(model)
        self.answered.of(of_model.model, worker, status).amount += 1
        of_model.prompt_tokens.amount += tokens
        of_model.overlap_tokens.amount += overlap

    def first_byte_of(self, model: str, seconds: float) -> None:
        """The first byte of an answer's body came, so long after the end of the request's."""
        of_model = self._of_models.get(model) or self._of(model)
        of_model.first_byte.observe(seconds)

    def completed(self, model: str, usage: Usage) -> None:
        """An answer ended, and told what it took."""
        of_model = self._of_models.get(model) or self._of(model)
        of_model.completion_tokens.amount += usage.completion

    def streamed(self, model: str, seconds: float, usage: Usage | None) -> None:
        """A stream ended, so long after its first byte."""
        if usage is not None and usage.completion > 1:
            of_model = self._of_models.get(model) or self._of(model)
            self.token_time.of(of_model.model).observe(seconds / (usage.completion - 1))

    def failures(self) -> dict[str, float]:
        """What went wrong until now: `errors` of workers, what the router `refused` for want of room, and `retried`."""
        errors = sum(count for status, count in self.answered.by("status").items() if int(status) >= 500)
        return {
            "errors": errors + _total(self.broken),
            "refused": _total(self.refused, "429", "503"),
            "retried": _total(self.retried),
        }

    def forget(self, worker: Worker) -> None:
        """A worker was removed: its series end."""
        self.answered.forget(worker.name)
        for counter in (self.retried, self.broken):
            counter.remove_by_labels({"worker": worker.name})


def _total(counter: prometheus_client.Counter, *values: str) -> float:
    """The sum of a counter's series; of those alone that have one of these values for a label, if any are given."""
    samples = (sample for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total"))
    return sum(sample.value for sample in samples if not values or not set(values).isdisjoint(sample.labels.values()))


class FleetCollector(Collector):
    """The workers and what is in flight on them, read when asked for."""

    def __init__(self, fleet: Fleet, load: LoadTable) -> None:
        self._fleet = fleet
        self._load = load

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvrouter_worker_up", "1 while a worker is used", labels=["worker"])
        state = GaugeMetricFamily("kvrouter_worker_state", "1 for the state it is in", labels=["worker", "state"])
        labels = ["worker", "dp_rank"]
        unseen = GaugeMetricFamily("kvrouter_requests_of_others", "Requests that came by other ways", labels=labels)
        usage = GaugeMetricFamily("kvrouter_kv_usage_ratio", "KV memory in use, as the engine tells", labels=labels)
        serving = GaugeMetricFamily("kvrouter_model_workers", "Workers that are used, by model", labels=["model"])
        requests = GaugeMetricFamily("kvrouter_requests_in_flight", "Requests in flight", labels=labels)
        pending = GaugeMetricFamily("kvrouter_prefill_tokens_in_flight", "Uncached tokens to prefill", labels=labels)
        of_models: dict[str, int] = {}
        for worker in self._fleet.workers:
            for model in worker.models():
                of_models[model] = of_models.get(model, 0) + worker.up
            up.add_metric([worker.name], float(worker.up))
            for known in WorkerState:
                state.add_metric([worker.name, known], float(worker.state is known))
            for dp_rank in worker.ranks():
                load = self._load.of(worker.url, dp_rank)
                requests.add_metric([worker.name, str(dp_rank)], load.requests)
                pending.add_metric([worker.name, str(dp_rank)], load.pending)
                engine = worker.metrics.get(dp_rank)
                unseen.add_metric([worker.name, str(dp_rank)], engine.unseen)
                if engine.kv_usage is not None:
                    usage.add_metric([worker.name, str(dp_rank)], engine.kv_usage)
        for model, count in sorted(of_models.items()):
            serving.add_metric([model], count)
        yield from (up, state, serving, requests, pending, unseen, usage)


class AuditCollector(Collector):
    """Predicted against actual cached tokens, by target."""

    def __init__(self, audit: HitAudit) -> None:
        self._audit = audit

    def collect(self) -> Iterator[Metric]:
        labels = ["worker", "dp_rank", "model"]
        answers = CounterMetricFamily(
            "kvrouter_audit_answers", "Answers that reported their cached tokens", labels=labels
        )
        prompt = CounterMetricFamily("kvrouter_audit_prompt_tokens", "Their prompts' tokens", labels=labels)
        predicted = CounterMetricFamily("kvrouter_audit_predicted_tokens", "Predicted cached tokens", labels=labels)
        cached = CounterMetricFamily("kvrouter_audit_cached_tokens", "Cached tokens as engines reported", labels=labels)
        wrong = CounterMetricFamily("kvrouter_audit_wrong_tokens", "Tokens predicted too high or low", labels=labels)
        lengths = CounterMetricFamily("kvrouter_audit_lengths_wrong", "Prompts of another length", labels=labels)
        error = GaugeMetricFamily("kvrouter_audit_error_ratio", "Recently wrong share of prompt tokens", labels=labels)
        drift = GaugeMetricFamily("kvrouter_audit_drift_ratio", "The same for predictions by events", labels=labels)
        basis = GaugeMetricFamily("kvrouter_audit_basis", "1 for what is predicted from", labels=[*labels, "basis"])
        for target, audit in self._audit.audits():
            values = [self._audit.names.get(target.worker), str(target.dp_rank), target.model]
            answers.add_metric(values, audit.answers)
            prompt.add_metric(values, audit.prompt_tokens)
            predicted.add_metric(values, audit.predicted_tokens)
            cached.add_metric(values, audit.cached_tokens)
            wrong.add_metric(values, audit.wrong_tokens)
            lengths.add_metric(values, audit.lengths_wrong)
            error.add_metric(values, audit.errors.share)
            drift.add_metric(values, audit.event_errors.share)
            for known in Basis:
                basis.add_metric([*values, known.value], float(self._audit.basis(target) is known))
        yield from (answers, prompt, predicted, cached, wrong, lengths, error, drift, basis)
