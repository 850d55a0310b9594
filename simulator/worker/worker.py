"""A simulated worker without HTTP: an engine and an event stream for each DP rank, and their shared services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from simulator.worker.completions import Completions
from simulator.worker.engine import SimulatedEngine
from simulator.worker.host_tier import listen
from simulator.worker.metrics import WorkerMetrics
from simulator.worker.pooling_api import Pooling
from simulator.worker.settings import SimulatedWorkerSettings
from simulator.worker.tokens import load_model
from worker.publisher import EventPublisher, NullEventPublisher
from worker.reporter import Reporter
from worker.zmq_publisher import ZmqEventPublisher

if TYPE_CHECKING:
    from simulator.worker.kv_transfer.roles import OpenRole  # needs numpy and an HTTP client


class SimulatedWorker:
    """The engines of a worker. Its event streams open at once; `running` starts the engines and closes everything.

    Raises OSError if an endpoint is in use or the tokenizer is missing, and ValueError for an unreachable host.
    """

    def __init__(self, settings: SimulatedWorkerSettings) -> None:
        self.settings = settings
        self.tokenizer, writer = load_model(settings.tokenizer)
        self.reporters: list[Reporter] = []
        try:
            for rank in range(settings.dp_size):
                self.reporters.append(Reporter(_publisher(settings, rank)))
            opened = _open_role(settings)
        except BaseException:
            self._close_reporters()
            raise
        self.disaggregated = opened
        self.engines = [
            SimulatedEngine(settings, reporter, opened.compute_kv(rank) if opened else None)
            for rank, reporter in enumerate(self.reporters)
        ]
        self.metrics = WorkerMetrics(settings, self.engines)
        if opened is not None:
            opened.attach(self.engines, self.metrics.registry)
        self.completions = Completions(
            settings, self.tokenizer, writer, self.engines, self.metrics, opened.role if opened else None
        )
        self.pooling = Pooling(self.tokenizer, settings.model)
        self._loops: list[asyncio.Task[None]] = []
        self._host_tiers: list[asyncio.Server] = []

    @property
    def is_alive(self) -> bool:
        """True if every engine is running."""
        return bool(self._loops) and not any(loop.done() for loop in self._loops)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engines within the block; only once."""
        try:
            self._loops = [asyncio.create_task(engine.run()) for engine in self.engines]
            tiers = [engine.host for engine in self.engines if engine.host is not None]
            self._host_tiers = await listen(tiers, self.settings.host, self.settings.pull_port)
            yield
        finally:
            for server in self._host_tiers:
                server.close()
            for loop in self._loops:
                loop.cancel()
            await asyncio.gather(*self._loops, return_exceptions=True)
            if self.disaggregated is not None:
                await self.disaggregated.close()
            await asyncio.to_thread(self._close_reporters)

    def _close_reporters(self) -> None:
        for reporter in self.reporters:
            reporter.shutdown()


def _open_role(settings: SimulatedWorkerSettings) -> OpenRole | None:
    if settings.role not in ("prefill", "decode"):
        return None
    from simulator.worker.kv_transfer.roles import OpenRole

    return OpenRole(settings)


def _publisher(settings: SimulatedWorkerSettings, rank: int) -> EventPublisher:
    config = settings.kv_events
    if config is None or config.publisher == "null":
        return NullEventPublisher()
    return ZmqEventPublisher(rank, **config.fields() | {"bind": not settings.connects})
