"""Probes: ask workers what they serve, and decide from the answers which workers are up.

Scrapes of /metrics read the workers' load. They are also signs of life, and show whether an engine sleeps.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import aiohttp
import structlog

from router.fleet.discovery import DiscoveryError, ServedModel, WorkerDescription, describe_worker, engine_label
from router.fleet.engine_metrics import Sleep
from router.fleet.event_streams import WorkerStreams
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker, WorkerState
from router.http.client import connection_problem, read_answer
from router.settings import FleetSettings, Role

log = structlog.get_logger()

# Failed probes in a row after which a worker is down: one late answer of a busy worker is not a failure.
FAILED_PROBES = 3
# The most workers that are down and are asked in a second, because each refusal uses the event loop for a while.
_RETRIES_A_SECOND = 200.0
# Where engines have their Prometheus metrics, if not at /metrics, by the engine of their pod's label.
_METRICS_PATHS: Final = {"trtllm-serve": "/prometheus/metrics"}


def retry_seconds(fleet: Fleet, interval: float) -> float:
    """Return the seconds until a worker that is down is asked again: `interval`, or more if very many are down."""
    down = sum(not worker.up for worker in fleet.workers)
    return max(interval, down / _RETRIES_A_SECOND)


class Prober:
    """Probes workers of a fleet, and updates their state. `on_model` is called with models of those that answer."""

    def __init__(
        self,
        fleet: Fleet,
        settings: FleetSettings,
        session: aiohttp.ClientSession,
        streams: WorkerStreams,
        on_model: Callable[[Worker, ServedModel], Awaitable[None]],
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._session = session
        self._streams = streams
        self._on_model = on_model

    async def probe_all(self) -> None:
        """Probe all workers once. None of them warms up: they all start at the same time."""
        workers = self._fleet.workers
        await asyncio.gather(*map(self.probe, workers))
        for worker in workers:
            worker.warming_since = None
        self._fleet.health_changed()

    async def probe(self, worker: Worker) -> None:
        """Ask a worker what it serves, and update its state."""
        if worker.key.read():  # The key file may have changed.
            self._fleet.notify_key(worker)
        if worker.probe_began is None:
            worker.probe_began = worker.health.clock()
        try:
            async with asyncio.timeout(self._settings.probe_timeout):
                description = await describe_worker(self._session, worker.settings, worker.key)
                description = await self._streams.without_refused(worker, description)
        except (DiscoveryError, TimeoutError) as error:
            if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                worker.note_refusal()
            self._failed(worker, str(error) or f"no answer within {self._settings.probe_timeout} s")
            return
        worker.note_answer()
        if self._fleet.at(worker.url) is not worker:
            return  # It was removed: an answer is only a sign of life.
        self.answered(worker, description)
        for model in description.base_models() if worker.role is not Role.ENCODE else ():
            await self._on_model(worker, model)
        self._fleet.notify_change()

    async def watch(self, worker: Worker) -> None:
        """Probe a worker until cancelled: at intervals, and soon after a failed request.

        A worker that is up is probed at most once in the `retry_interval`.
        """
        clock, retry = asyncio.get_running_loop().time, self._settings.retry_interval
        if worker.state is WorkerState.NEW:
            await self.probe(worker)
        probed = -math.inf
        while True:
            well = worker.up and not worker.failed_probes
            try:
                seconds = self._settings.probe_interval if well else retry_seconds(self._fleet, retry)
                async with asyncio.timeout(seconds):
                    await worker.probe_now.wait()
                worker.probe_now.clear()
                since = clock() - probed if worker.up else 0.0
                await asyncio.sleep(max(retry - since, 0.0))
            except TimeoutError:
                pass
            probed = clock()
            await self.probe(worker)
            worker.probed.set()
            worker.probed.clear()

    def _failed(self, worker: Worker, problem: str) -> None:
        worker.failed_probes += 1
        if worker.up and worker.failed_probes < FAILED_PROBES:
            return
        worker.note_refusal()
        is_known, worker.problem = worker.problem == problem, problem
        worker.health.move_waiting()
        if self._fleet.at(worker.url) is not worker:
            return
        self._streams.suspend(worker)
        if is_known:
            self._fleet.notify_change()
        else:
            self._fleet.changed()

    def answered(self, worker: Worker, description: WorkerDescription) -> None:
        """Apply the description of a worker that is up, and register its streams."""
        is_new = description != worker.description
        if is_new:
            self._streams.register(worker, description)
        self._warm_up(worker)
        if worker.refused_at is not None:
            if worker.description is not None:
                self._fleet.notify_restarted(worker, worker.refused_at)
            worker.refused_at = None
        worker.failed_probes = 0
        refused, worker.refused_names = worker.refused_names, set()
        if worker.up and not is_new:
            if refused:
                self._fleet.changed()
            return
        if not worker.up:
            worker.starts += 1
            self._streams.resume(worker)
        self._describe(worker, description)
        worker.problem = None
        self._fleet.expect(description.models)
        self._fleet.changed()

    def _warm_up(self, worker: Worker) -> None:
        """Begin to warm up a worker that is new or was down; end it when the worker receives its full share."""
        if not worker.up and (worker.failed_probes or worker.description is None):
            worker.warming_since = worker.health.clock()
            worker.health.forget()
            worker.restarted()
            self._fleet.health_changed()
        elif worker.warming_since is not None and worker.share >= 1:
            worker.warming_since = None
            self._fleet.health_changed()

    def _describe(self, worker: Worker, description: WorkerDescription) -> None:
        """Apply a description. A name that now means another model is logged and reported to listeners."""
        before = dict(worker.changed_models)
        worker.describe(description)
        if worker.changed_models != before:
            log.warning("model replaced under the same name", worker=worker.name, models=worker.recent_changes())
            self._fleet.notify_replaced(worker)


class MetricsScraper:
    """Scrapes the metrics of workers. `peer_load`: returns other routers' requests on ranks of a worker's URL."""

    def __init__(
        self,
        fleet: Fleet,
        settings: FleetSettings,
        session: aiohttp.ClientSession,
        peer_load: Callable[[str, Iterable[int]], Counter[int]],
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._session = session
        self._peer_load = peer_load

    async def watch(self, worker: Worker) -> None:
        """Scrape a worker at intervals until the task is cancelled."""
        while True:
            await self._scrape(worker)
            seconds = self._settings.metrics_interval
            await asyncio.sleep(seconds if worker.up else retry_seconds(self._fleet, seconds))

    async def _scrape(self, worker: Worker) -> None:
        """Scrape a worker once. An answer with any status is a sign of life."""
        before = self._in_flight(worker)
        worker.metrics.scrape_began()
        try:
            body = await self._get(worker)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            log.debug("metrics not read", worker=worker.name, reason=connection_problem(error))
            return
        if worker.metrics.answers:
            worker.answer_seconds.append(worker.metrics.unanswered)
        worker.metrics.scrape_answered()
        # A request that began or ended during the scrape counts as one of this router's requests.
        last = worker.metrics.read_at
        restarted = worker.metrics.read(body.decode(errors="replace"), before | self._in_flight(worker))
        if self._fleet.at(worker.url) is not worker:
            return
        if restarted:
            self._fleet.notify_restarted(worker, last)
        if (sleep := worker.metrics.sleep) is not None and not worker.sleep_in_change:
            self._fleet.set_asleep(worker, sleep is not Sleep.AWAKE, sleep is not Sleep.WITHOUT_CACHE)
        self._fleet.notify_scrape(worker)

    async def _get(self, worker: Worker) -> bytes:
        path = _METRICS_PATHS.get(engine_label(worker.settings), "/metrics")
        timeout = aiohttp.ClientTimeout(total=self._settings.probe_timeout)
        async with self._session.get(
            worker.url + path, headers=worker.key.headers, timeout=timeout, allow_redirects=False
        ) as response:
            worker.key.record_status(path, response.status)
            return await read_answer(response) if response.status == 200 else b""

    def _in_flight(self, worker: Worker) -> Counter[int]:
        """Return the requests in flight on each rank: this router's and those of other routers."""
        return worker.health.in_flight() + self._peer_load(worker.url, worker.ranks())
