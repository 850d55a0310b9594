"""How each model's prompts become tokens, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.tokens.tokenizers import Tokenizers


class TokenizerCollector(Collector):
    """The tokenizers as they are when asked for."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers

    def collect(self) -> Iterator[Metric]:
        """The way of each model, how often each way was taken and for how long, and what the caches take."""
        by_way = ["model", "way"]
        way = GaugeMetricFamily("kvrouter_tokenizer", "1 for how prompts become tokens", labels=by_way)
        asked = GaugeMetricFamily(
            "kvrouter_tokenizer_asked_shapes", "Shapes that engines are asked of", labels=["model"]
        )
        cache = GaugeMetricFamily("kvrouter_tokenizer_cache_bytes", "What texts seen before take", labels=["model"])
        prompts = CounterMetricFamily(
            "kvrouter_tokenizer_prompts", "Requests whose prompts became tokens", labels=by_way
        )
        seconds = CounterMetricFamily("kvrouter_tokenizer_seconds", "Time that took", labels=by_way)
        for model, tokenizer in self._tokenizers.by_model().items():
            way.add_metric([model, tokenizer.way], 1)
            asked.add_metric([model], len(tokenizer.asked))
            cache.add_metric([model], tokenizer.cached_bytes)
            for path, spent in tokenizer.usage.seconds.items():
                prompts.add_metric([model, path.value], tokenizer.usage.prompts[path])
                seconds.add_metric([model, path.value], spent)
        yield from (way, asked, cache, prompts, seconds)
