"""How each model's prompts become tokens, for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.tokens.tokenizers import Tokenizers


class TokenizerCollector(Collector):
    """The tokenizers as they are when asked for."""

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers

    def collect(self) -> Iterator[Metric]:
        """The way of each model, and what its cache takes."""
        way = GaugeMetricFamily("kvrouter_tokenizer", "1 for how prompts become tokens", labels=["model", "way"])
        cache = GaugeMetricFamily("kvrouter_tokenizer_cache_bytes", "What texts seen before take", labels=["model"])
        for model, tokenizer in self._tokenizers.by_model().items():
            way.add_metric([model, tokenizer.way], 1)
            cache.add_metric([model], tokenizer.cached_bytes)
        yield from (way, cache)
