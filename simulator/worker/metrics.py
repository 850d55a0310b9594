"""The /metrics of a worker under vLLM's names, one series for each DP rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from simulator.worker.engine import SimulatedEngine
from simulator.worker.settings import SimulatedWorkerSettings

LABELS = ("model_name", "engine")
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                  40.0, 80.0, 160.0)  # fmt: skip


class WorkerMetrics:
    """Metrics that read the engines at each scrape. Only times are recorded."""

    def __init__(self, settings: SimulatedWorkerSettings, engines: Sequence[SimulatedEngine]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(settings, engines))
        ttft = Histogram(
            "vllm:time_to_first_token_seconds",
            "Time from a request's arrival to its first token.",
            LABELS,
            registry=self.registry,
            buckets=TTFT_BUCKETS_S,
        )
        self._ttft = [ttft.labels(settings.model, str(rank)) for rank in range(len(engines))]

    def observe_first_token(self, rank: int, seconds: float) -> None:
        self._ttft[rank].observe(seconds)


class _EngineCollector(Collector):
    def __init__(self, settings: SimulatedWorkerSettings, engines: Sequence[SimulatedEngine]) -> None:
        self._settings = settings
        self._engines = engines

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("num_requests_running", "Requests being computed.", [e.num_running for e in self._engines])
        yield self._gauge("num_requests_waiting", "Requests that are waiting.", [e.num_waiting for e in self._engines])
        yield self._gauge(
            "kv_cache_usage_perc", "Share of blocks in use, 0 to 1.", [e.cache.usage for e in self._engines]
        )
        asleep = GaugeMetricFamily(
            "vllm:engine_sleep_state",
            "Sleep state of the engine: 1 for the current state.",
            labels=(*LABELS, "sleep_state"),
        )
        for rank, engine in enumerate(self._engines):
            for level, state in ((None, "awake"), (1, "weights_offloaded"), (2, "discard_all")):
                asleep.add_metric((self._settings.model, str(rank), state), float(engine.sleep_level == level))
        yield asleep
        stats = [engine.stats for engine in self._engines]
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up.", [s.prefix_queries for s in stats])
        yield self._counter("prefix_cache_hits", "Prompt tokens found cached.", [s.prefix_hits for s in stats])
        yield self._counter("prompt_tokens", "Prompt tokens processed.", [s.prompt_tokens for s in stats])
        yield self._counter("generation_tokens", "Tokens generated.", [s.generation_tokens for s in stats])
        yield self._counter("num_preemptions", "Preemptions.", [s.preemptions for s in stats])
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests that ended, by reason.", labels=(*LABELS, "finished_reason")
        )
        for rank, each in enumerate(stats):
            for reason, count in each.finished.items():
                finished.add_metric((self._settings.model, str(rank), reason), count)
        yield finished
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Configuration of the cache.",
            labels=("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        for rank in range(len(self._engines)):
            layout = (self._settings.block_size, self._settings.num_blocks, self._settings.prefix_caching)
            config.add_metric((str(rank), *map(str, layout)), 1)
        yield config

    def _gauge(self, name: str, text: str, by_rank: Sequence[float]) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        for rank, value in enumerate(by_rank):
            family.add_metric((self._settings.model, str(rank)), value)
        return family

    def _counter(self, name: str, text: str, by_rank: Sequence[float]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
        for rank, value in enumerate(by_rank):
            family.add_metric((self._settings.model, str(rank)), value)
        return family
