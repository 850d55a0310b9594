"""What a prefill or decode worker has moved, in its /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from simulator.worker.disaggregation.rank import TransferRank

LABELS = ("model_name", "engine")

_COUNTERS: tuple[tuple[str, str, Callable[[TransferRank], float]], ...] = (
    ("kv_transfers_sent", "Prompts whose KV landed on another worker.", lambda rank: rank.counts.sent),
    ("kv_transfers_received", "Prompts whose KV came from another worker.", lambda rank: rank.counts.received),
    ("kv_transfers_failed", "Transfers that came to nothing, given up or failed.", lambda rank: rank.counts.failed),
    ("kv_bytes_received", "Bytes of KV pages that came.", lambda rank: rank.counts.bytes_received),
    ("kv_pages_checked", "Pages held against the tokens.", lambda rank: rank.counts.pages_checked),
    ("kv_pages_wrong", "Pages that had other bytes.", lambda rank: rank.counts.pages_wrong),
)
_GAUGES: tuple[tuple[str, str, Callable[[TransferRank], float]], ...] = (
    ("kv_rooms", "Transfers under way.", lambda rank: rank.manager.stats().rooms),
    (
        "kv_pages_quarantined",
        "Pages that a write may still reach.",
        lambda rank: rank.manager.stats().quarantined_pages,
    ),
)


class TransferMetrics(Collector):
    """Reads the ranks whenever it is scraped."""

    def __init__(self, model: str, ranks: Sequence[TransferRank]) -> None:
        self._model = model
        self._ranks = ranks

    def collect(self) -> Iterator[Metric]:
        for family, described in ((CounterMetricFamily, _COUNTERS), (GaugeMetricFamily, _GAUGES)):
            for name, text, value in described:
                metric = family(f"simulated:{name}", text, labels=LABELS)
                for rank in self._ranks:
                    metric.add_metric((self._model, str(rank.number)), value(rank))
                yield metric
