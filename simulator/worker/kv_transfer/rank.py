"""A DP rank that moves KV pages, and its metrics."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from simulator.worker.engine import SimulatedEngine
from simulator.worker.kv_transfer.memory import KvMemory
from simulator.worker.settings import SimulatedWorkerSettings
from worker.kv_transfer import DisaggregationMode, DisaggregationSettings, KVManager, KVPoll, Rank, Topology
from worker.kv_transfer.transfer import open_engine

logger = logging.getLogger(__name__)

POLL_S = 0.005
OVER = (KVPoll.Success, KVPoll.Failed)


@dataclass(slots=True)
class TransferCounts:
    """Counts since the start. Bytes and pages are counted by the receiver."""

    sent: int = 0
    received: int = 0
    failed: int = 0
    bytes_received: int = 0
    pages_checked: int = 0
    pages_wrong: int = 0


class TransferRank:
    """A DP rank that transfers KV. Its engine is set later. Raises OSError and ValueError as its parts do."""

    engine: SimulatedEngine

    def __init__(self, settings: SimulatedWorkerSettings, number: int, bootstrap_addr: str) -> None:
        self.settings = settings
        self.number = number
        self.bootstrap_addr = bootstrap_addr
        self.counts = TransferCounts()
        mode = DisaggregationMode(settings.role)
        self._transfer_engine = open_engine("tcp", host=settings.host)
        try:
            self._free_items = list(range(settings.max_num_seqs + settings.max_waiting))
            self.memory = KvMemory(
                self._transfer_engine,
                settings.num_blocks,
                settings.block_size,
                len(self._free_items),
                settings.model,
            )
            # Each decode rank is a decode instance, which connects to the prefill rank with the request.
            of_prefill = mode is DisaggregationMode.PREFILL
            self.manager = KVManager(
                self.memory.args(),
                mode,
                self._transfer_engine,
                DisaggregationSettings(
                    host=settings.host,
                    bootstrap_addr=bootstrap_addr,
                    room_timeout_s=settings.transfer_timeout_s,
                    heartbeat_s=1.0,
                ),
                Topology(dp=settings.dp_size) if of_prefill else None,
                Rank(dp=number) if of_prefill else None,
            )
        except BaseException:
            self._transfer_engine.close()
            raise
        self._tasks: set[asyncio.Task[None]] = set()

    def take_item(self) -> int | None:
        """Return a free aux item; `None` if all are in use."""
        return self._free_items.pop() if self._free_items else None

    def free_item(self, item: int) -> None:
        self._free_items.append(item)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a transfer's coroutine until it ends, or until this rank closes."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a transfer's task failed", exc_info=error)

    async def close(self) -> None:
        """Cancel all transfers."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.close_sockets)

    def close_sockets(self) -> None:
        """End the threads of a rank without tasks."""
        self.manager.close()
        self._transfer_engine.close()


async def until(condition: Callable[[], bool]) -> None:
    """Poll the state of a transfer, as an engine does in each step."""
    while not condition():  # noqa: ASYNC110 - other threads change it
        await asyncio.sleep(POLL_S)


LABELS = ("model_name", "engine")

_COUNTERS: tuple[tuple[str, str, Callable[[TransferRank], float]], ...] = (
    ("kv_transfers_sent", "Prompts whose KV landed on another worker.", lambda rank: rank.counts.sent),
    ("kv_transfers_received", "Prompts whose KV was received from another worker.", lambda rank: rank.counts.received),
    ("kv_transfers_failed", "Transfers that were aborted or failed.", lambda rank: rank.counts.failed),
    ("kv_bytes_received", "Bytes of received KV pages.", lambda rank: rank.counts.bytes_received),
    (
        "kv_pages_checked",
        "Received pages that were compared with their tokens.",
        lambda rank: rank.counts.pages_checked,
    ),
    ("kv_pages_wrong", "Received pages with wrong bytes.", lambda rank: rank.counts.pages_wrong),
)
_GAUGES: tuple[tuple[str, str, Callable[[TransferRank], float]], ...] = (
    ("kv_rooms", "Current transfers.", lambda rank: rank.manager.stats().rooms),
    (
        "kv_pages_quarantined",
        "Pages that a write can still reach.",
        lambda rank: rank.manager.stats().quarantined_pages,
    ),
)


class TransferMetrics(Collector):
    """A collector that reads the ranks at each scrape."""

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
