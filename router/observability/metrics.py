"""The router's metrics for Prometheus.

One file, because it is the list of them: names, labels and help texts are compared here.
"""

from __future__ import annotations

from collections.abc import Iterator

import prometheus_client
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.apis.usage import Usage
from router.cache_state.hit_audit import HitAudit
from router.cache_state.target_audit import Basis, CachePrediction
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker, WorkerState
from router.load.target_load import LoadTable
from router.observability.counters import Counter, CounterSeries, Histogram
from router.observability.role_load import role_loads
from router.policies import Decision
from router.policies.custom import CustomPolicy
from router.policies.records import CostUnit
from router.routing.pulls import PullResult
from router.routing.sources import LoadRates

_SHORT_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
# The bounds that OpenTelemetry recommends for token counts.
_TOKEN_BUCKETS = tuple(4.0**power for power in range(14))
_RATIO_BUCKETS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_FIRST_BYTE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# Maximum number of models with their own series, and the label of all others. A worker can change its models' names.
MOST_MODELS = 1024
OTHER_MODELS = "other"


class _ModelSeries:
    __slots__ = (
        "best_overlap_tokens",
        "cached",
        "choosing",
        "completion_tokens",
        "costs",
        "decisions",
        "first_byte",
        "hit_ratio",
        "input",
        "loadable_tokens",
        "model",
        "output",
        "overlap_tokens",
        "prompt_tokens",
        "queue",
        "tokenizing",
        "waiting",
    )

    def __init__(self, model: str, metrics: RequestMetrics) -> None:
        self.model = model
        self.queue = metrics.queue.labels(model)
        self.tokenizing = metrics.tokenizing.labels(model)
        self.choosing = metrics.choosing.labels(model)
        self.waiting = metrics.waiting.labels(model)
        self.input = metrics.input.labels(model)
        self.output = metrics.output.labels(model)
        self.cached = metrics.cached.labels(model)
        self.hit_ratio = metrics.hit_ratio.labels(model)
        self.first_byte = metrics.first_byte.labels(model)
        self.decisions = metrics.decisions.labels(model)
        self.prompt_tokens = metrics.prompt_tokens.labels(model)
        self.overlap_tokens = metrics.overlap_tokens.labels(model)
        self.best_overlap_tokens = metrics.best_overlap_tokens.labels(model)
        self.loadable_tokens = metrics.loadable_tokens.labels(model)
        self.completion_tokens = metrics.completion_tokens.labels(model)
        self.costs: dict[CostUnit, dict[str, CounterSeries]] = {}  # by unit and term


class RequestMetrics:
    """The metrics of requests. Models are names that workers serve, up to a limit, so that label sets stay bounded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.refused = prometheus_client.Counter(
            "kvrouter_requests_refused", "Requests refused by the router, by status", ["status"], registry=registry
        )
        self.retried = prometheus_client.Counter(
            "kvrouter_requests_retried", "Attempts that were retried on another worker", ["worker"], registry=registry
        )
        self.full = prometheus_client.Counter(
            "kvrouter_worker_full", "Requests that a full worker refused", ["worker"], registry=registry
        )
        self.of_tenant = prometheus_client.Counter(
            "kvrouter_tenant_requests", "Requests by tenant and status", ["tenant", "status"], registry=registry
        )
        self.abandoned = prometheus_client.Counter(
            "kvrouter_requests_abandoned", "Requests whose client disconnected", registry=registry
        )
        self.broken = prometheus_client.Counter(
            "kvrouter_answers_broken", "Responses that a worker did not complete", ["worker"], registry=registry
        )
        self.pulls = prometheus_client.Counter(
            "kvrouter_pulls",
            "Answers to requests that named a peer to pull from, by result",
            ["result"],
            registry=registry,
        )
        self.pulled_tokens = prometheus_client.Counter(
            "kvrouter_pulled_tokens", "Prompt tokens that workers pulled from peers", registry=registry
        )
        self.media_items = Counter(
            "kvrouter_media_items", "Media items of chats, by where they are encoded", ["result"], registry
        )
        self.encode_requests = Counter(
            "kvrouter_encode_requests", "Media items sent to encode workers", ["worker", "status"], registry
        )
        self.encode_seconds = Histogram(
            "kvrouter_encode_seconds",
            "Seconds until the media of a chat were encoded",
            ["model"],
            registry,
            _FIRST_BYTE_BUCKETS,
        )
        # Metrics that every request updates.
        self.answered = Counter(
            "kvrouter_requests", "Requests answered by workers", ["model", "worker", "status"], registry
        )
        self.prompt_tokens = Counter("kvrouter_prompt_tokens", "Prompt tokens of routed requests", ["model"], registry)
        self.overlap_tokens = Counter(
            "kvrouter_overlap_tokens", "Prompt tokens predicted to be cached on the chosen worker", ["model"], registry
        )
        self.best_overlap_tokens = Counter(
            "kvrouter_best_overlap_tokens",
            "Prompt tokens predicted to be cached on the best worker",
            ["model"],
            registry,
        )
        self.loadable_tokens = Counter(
            "kvrouter_loadable_tokens",
            "Prompt tokens predicted to be loaded on the chosen worker from a pool or a peer",
            ["model"],
            registry,
        )
        self.completion_tokens = Counter(
            "kvrouter_completion_tokens", "Generated tokens, as reported by engines", ["model"], registry
        )
        self.decisions = Counter("kvrouter_decisions", "Routing decisions", ["model"], registry)
        self.cost = Counter(
            "kvrouter_decision_cost", "Cost of the chosen targets, by term", ["model", "term", "unit"], registry
        )
        self.queue = Histogram(
            "kvrouter_queue_seconds",
            "Seconds from the end of a request's body until it is sent to a worker",
            ["model"],
            registry,
            _SHORT_BUCKETS,
        )
        self.tokenizing = Histogram(
            "kvrouter_tokenizing_seconds",
            "Seconds from the end of a request's body until its prompt is tokenized",
            ["model"],
            registry,
            _SHORT_BUCKETS,
        )
        self.choosing = Histogram(
            "kvrouter_scheduler_seconds",
            "Seconds of the choice of a worker, without waiting",
            ["model"],
            registry,
            _SHORT_BUCKETS,
        )
        self.waiting = Histogram(
            "kvrouter_request_queue_duration_seconds",
            "Seconds for which a request waited for a worker with capacity",
            ["model"],
            registry,
            _FIRST_BYTE_BUCKETS,
        )
        self.input = Histogram(
            "kvrouter_request_input_tokens", "Prompt tokens of a routed request", ["model"], registry, _TOKEN_BUCKETS
        )
        self.output = Histogram(
            "kvrouter_request_output_tokens",
            "Generated tokens of an answer, as reported by engines",
            ["model"],
            registry,
            _TOKEN_BUCKETS,
        )
        self.cached = Histogram(
            "kvrouter_request_cached_tokens",
            "Cached prompt tokens of an answer, as reported by engines",
            ["model"],
            registry,
            _TOKEN_BUCKETS,
        )
        self.hit_ratio = Histogram(
            "kvrouter_prefix_indexer_hit_ratio",
            "Share of a prompt predicted to be cached on the chosen worker",
            ["model"],
            registry,
            _RATIO_BUCKETS,
        )
        self.first_byte = Histogram(
            "kvrouter_time_to_first_byte_seconds",
            "Seconds from the end of a request's body to the first byte of the response's body",
            ["model"],
            registry,
            _FIRST_BYTE_BUCKETS,
        )
        self.token_time = Histogram(
            "kvrouter_time_per_output_token_seconds",
            "Seconds per output token after the first, from a stream's first byte to its last",
            ["model"],
            registry,
            _SHORT_BUCKETS,
        )
        self._of_models: dict[str, _ModelSeries] = {}

    def _of(self, model: str) -> _ModelSeries:
        if len(self._of_models) >= MOST_MODELS:
            model = OTHER_MODELS
            if model in self._of_models:
                return self._of_models[model]
        of_model = self._of_models[model] = _ModelSeries(model, self)
        return of_model

    def tokenized(self, model: str, seconds: float) -> None:
        """Record that a prompt is known, `seconds` after the request was complete."""
        of_model = self._of_models.get(model) or self._of(model)
        of_model.tokenizing.observe(seconds)

    def chosen(self, model: str, seconds: float, waited: bool) -> None:
        """Record the `seconds` of a choice, or of the wait for a worker with capacity."""
        of_model = self._of_models.get(model) or self._of(model)
        if waited:
            of_model.waiting.observe(seconds)
        else:
            of_model.choosing.observe(seconds)
            of_model.waiting.observe(0.0)

    def placed(self, model: str, waited: float, decision: Decision, cache_prediction: CachePrediction | None) -> None:
        """Record a choice, `waited` seconds after the request was complete, and its prediction, if there is one."""
        of_model = self._of_models.get(model) or self._of(model)
        of_model.queue.observe(waited)
        of_model.decisions.amount += 1
        if cache_prediction is not None:
            of_model.best_overlap_tokens.amount += cache_prediction.most
            of_model.loadable_tokens.amount += cache_prediction.loadable
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
                    cost = costs[term] = self.cost.labels(of_model.model, term, unit.value)
                cost.amount += amount

    def begun(self, model: str, worker: str, status: int, tokens: int, overlap: int) -> None:
        """Record the beginning of a worker's response to a prompt of `tokens`."""
        of_model = self._of_models.get(model) or self._of(model)
        self.answered.labels(of_model.model, worker, status).amount += 1
        of_model.prompt_tokens.amount += tokens
        of_model.overlap_tokens.amount += overlap
        if tokens:
            of_model.input.observe(tokens)
            of_model.hit_ratio.observe(overlap / tokens)

    def encoded(self, model: str, seconds: float) -> None:
        """Record the end of a chat's encode stage."""
        of_model = self._of_models.get(model) or self._of(model)
        self.encode_seconds.labels(of_model.model).observe(seconds)

    def encoder_answered(self, worker: str, status: int) -> None:
        """Record the answer of an encode worker; a `status` of 0 means that it broke off."""
        self.encode_requests.labels(worker, status or "broken").amount += 1

    def first_byte_of(self, model: str, seconds: float) -> None:
        """Record the first byte of a response, `seconds` after the end of the request."""
        of_model = self._of_models.get(model) or self._of(model)
        of_model.first_byte.observe(seconds)

    def completed(self, model: str, usage: Usage) -> None:
        """Record the usage of a complete response."""
        of_model = self._of_models.get(model) or self._of(model)
        of_model.completion_tokens.amount += usage.completion
        of_model.output.observe(usage.completion)
        if usage.cached is not None:
            of_model.cached.observe(usage.cached)

    def streamed(self, model: str, seconds: float, usage: Usage | None) -> None:
        """Record the end of a stream, `seconds` after its first byte."""
        if usage is not None and usage.completion > 1:
            of_model = self._of_models.get(model) or self._of(model)
            self.token_time.labels(of_model.model).observe(seconds / (usage.completion - 1))

    def pulled(self, result: PullResult, tokens: int) -> None:
        """Record the result of a pull of `tokens` tokens."""
        self.pulls.labels(result.value).inc()
        if result is PullResult.PULLED:
            self.pulled_tokens.inc(tokens)

    def worker_full(self, worker: Worker) -> None:
        """Count a request that a worker refused because it is full."""
        self.full.labels(worker.name).inc()

    def failures(self) -> dict[str, float]:
        """Return the totals of workers' `errors`, of requests `refused` under load, and of `retried` attempts."""
        errors = sum(count for status, count in self.answered.by("status").items() if int(status) >= 500)
        return {
            "errors": errors + _total(self.broken),
            "refused": _total(self.refused, "429", "503"),
            "retried": _total(self.retried),
        }

    def forget(self, worker: Worker) -> None:
        """Drop the series of a removed worker."""
        self.answered.forget(worker.name)
        self.encode_requests.forget(worker.name)
        for counter in (self.retried, self.full, self.broken):
            counter.remove_by_labels({"worker": worker.name})


def _total(counter: prometheus_client.Counter, *values: str) -> float:
    """Return the sum of a counter's series; with `values`, of those series that have one of them as a label."""
    samples = (sample for metric in counter.collect() for sample in metric.samples if sample.name.endswith("_total"))
    return sum(sample.value for sample in samples if not values or not set(values).isdisjoint(sample.labels.values()))


class FleetCollector(Collector):
    """The metrics of workers and their load, computed when they are scraped."""

    def __init__(self, fleet: Fleet, load: LoadTable) -> None:
        self._fleet = fleet
        self._load = load

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvrouter_worker_up", "1 while the worker gets requests", labels=["worker"])
        state = GaugeMetricFamily(
            "kvrouter_worker_state", "1 for the worker's current state", labels=["worker", "state"]
        )
        labels = ["worker", "dp_rank"]
        unseen = GaugeMetricFamily(
            "kvrouter_requests_of_others", "Requests on the worker that this router did not send", labels=labels
        )
        usage = GaugeMetricFamily(
            "kvrouter_kv_usage_ratio", "Share of KV memory in use, as reported by the engine", labels=labels
        )
        queue = GaugeMetricFamily(
            "kvrouter_engine_queue_size", "Requests that wait in the engine, as it reports", labels=labels
        )
        serving = GaugeMetricFamily("kvrouter_model_workers", "Workers that get requests, by model", labels=["model"])
        requests = GaugeMetricFamily("kvrouter_requests_in_flight", "Requests in flight", labels=labels)
        pending = GaugeMetricFamily(
            "kvrouter_prefill_tokens_in_flight", "Uncached prompt tokens of requests in flight", labels=labels
        )
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
                if engine.queue is not None:
                    queue.add_metric([worker.name, str(dp_rank)], engine.queue)
                if engine.kv_usage is not None:
                    usage.add_metric([worker.name, str(dp_rank)], engine.kv_usage)
        for model, count in sorted(of_models.items()):
            serving.add_metric([model], count)
        yield from (up, state, serving, requests, pending, unseen, queue, usage, *self._roles())

    def _roles(self) -> Iterator[Metric]:
        labels = ["model", "role"]
        queue = GaugeMetricFamily(
            "kvrouter_role_prefill_seconds", "Mean predicted seconds until a rank's prefills are done", labels=labels
        )
        usage = GaugeMetricFamily("kvrouter_role_kv_usage_ratio", "Mean share of KV memory in use", labels=labels)
        for each in role_loads(self._fleet.workers, self._load):
            queue.add_metric([each.model, each.role], each.prefill_seconds)
            if each.kv_usage is not None:
                usage.add_metric([each.model, each.role], each.kv_usage)
        yield from (queue, usage)


class PolicyCollector(Collector):
    """The failures of custom policies, by function."""

    def __init__(self, policy: CustomPolicy) -> None:
        self._policy = policy

    def collect(self) -> Iterator[Metric]:
        failures = CounterMetricFamily(
            "kvrouter_policy_failures",
            "Choices in which a policy of one's own failed or was slow",
            labels=["policy", "reason"],
        )
        off = GaugeMetricFamily(
            "kvrouter_policy_switched_off", "1 if a policy of one's own is switched off", labels=["policy"]
        )
        for each in self._policy.functions:
            failures.add_metric([each.name, "error"], each.errors)
            failures.add_metric([each.name, "slow"], each.slow)
            off.add_metric([each.name], float(each.switched_off))
        yield from (failures, off)


class LoadRateCollector(Collector):
    """The learned duration of loads from pools and peers. `rates`: None without pools and pulls."""

    def __init__(self, rates: LoadRates | None) -> None:
        self._rates = rates

    def collect(self) -> Iterator[Metric]:
        start = GaugeMetricFamily(
            "kvrouter_load_start_seconds", "Learned seconds before the first token of a load", labels=["source"]
        )
        token = GaugeMetricFamily(
            "kvrouter_load_token_seconds", "Learned seconds per token of a load", labels=["source"]
        )
        for source, (start_seconds, token_seconds) in (self._rates.learned() if self._rates else {}).items():
            start.add_metric([source], start_seconds)
            token.add_metric([source], token_seconds)
        yield from (start, token)


class AuditCollector(Collector):
    """The metrics of predicted and reported cached tokens, by target."""

    def __init__(self, audit: HitAudit) -> None:
        self._audit = audit

    def collect(self) -> Iterator[Metric]:
        labels = ["worker", "dp_rank", "model"]
        answers = CounterMetricFamily("kvrouter_audit_answers", "Responses that reported cached tokens", labels=labels)
        prompt = CounterMetricFamily(
            "kvrouter_audit_prompt_tokens", "Prompt tokens of responses that reported cached tokens", labels=labels
        )
        predicted = CounterMetricFamily("kvrouter_audit_predicted_tokens", "Cached tokens as predicted", labels=labels)
        cached = CounterMetricFamily(
            "kvrouter_audit_cached_tokens", "Cached tokens as reported by engines", labels=labels
        )
        wrong = CounterMetricFamily(
            "kvrouter_audit_wrong_tokens", "Difference of predicted and reported cached tokens", labels=labels
        )
        loadable = CounterMetricFamily(
            "kvrouter_audit_loadable_tokens", "Tokens predicted to be loaded from a pool or a peer", labels=labels
        )
        loaded = CounterMetricFamily(
            "kvrouter_audit_loaded_tokens", "Predicted loads that cached tokens confirm", labels=labels
        )
        unexplained = CounterMetricFamily(
            "kvrouter_audit_unexplained_tokens", "Cached tokens beyond the own and the loadable ones", labels=labels
        )
        lengths = CounterMetricFamily(
            "kvrouter_audit_lengths_wrong", "Prompts whose length differs from the engine's", labels=labels
        )
        error = GaugeMetricFamily(
            "kvrouter_audit_error_ratio", "Wrongly predicted share of recent prompt tokens", labels=labels
        )
        drift = GaugeMetricFamily(
            "kvrouter_audit_drift_ratio",
            "Wrongly predicted share of recent prompt tokens, for predictions by events",
            labels=labels,
        )
        basis = GaugeMetricFamily(
            "kvrouter_audit_basis", "1 for the current basis of predictions", labels=[*labels, "basis"]
        )
        for target, audit in self._audit.audits():
            values = [self._audit.names.get(target.worker), str(target.dp_rank), target.model]
            answers.add_metric(values, audit.answers)
            prompt.add_metric(values, audit.prompt_tokens)
            predicted.add_metric(values, audit.predicted_tokens)
            cached.add_metric(values, audit.cached_tokens)
            wrong.add_metric(values, audit.wrong_tokens)
            loadable.add_metric(values, audit.loadable_tokens)
            loaded.add_metric(values, audit.loaded_tokens)
            unexplained.add_metric(values, audit.unexplained_tokens)
            lengths.add_metric(values, audit.lengths_wrong)
            error.add_metric(values, audit.errors.share)
            drift.add_metric(values, audit.event_errors.share)
            for known in Basis:
                basis.add_metric([*values, known.value], float(self._audit.basis(target) is known))
        yield from (answers, prompt, predicted, cached, wrong, lengths, error, drift, basis)
        yield from (loadable, loaded, unexplained)
