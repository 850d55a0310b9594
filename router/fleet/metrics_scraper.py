"""Scrapes of the workers' /metrics: their load, signs of life, and whether their engines sleep."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable

import aiohttp
import structlog

from router.fleet.engine_metrics import Sleep
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.http.client import connection_problem, read_answer
from router.settings import FleetSettings

log = structlog.get_logger()


class MetricsScraper:
    """Scrapes the metrics of workers of a fleet.

    `peer_load` returns the requests of other routers on some ranks of the worker with a URL.
    """

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
            await asyncio.sleep(self._settings.metrics_interval)

    async def _scrape(self, worker: Worker) -> None:
        """Scrape a worker once. An answer with any status is a sign of life."""
        before = self._in_flight(worker)
        worker.metrics.scrape_began()
        try:
            body = await self._get(worker)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            log.debug("metrics not read", worker=worker.name, reason=connection_problem(error))
            return
        worker.metrics.scrape_answered()
        # A request that began or ended during the scrape counts as one of this router's requests.
        last = worker.metrics.read_at
        if worker.metrics.read(body.decode(errors="replace"), before | self._in_flight(worker)):
            self._fleet.notify_restarted(worker, last)
        if (sleep := worker.metrics.sleep) is not None and not worker.sleep_in_change:
            self._fleet.set_asleep(worker, sleep is not Sleep.AWAKE, sleep is not Sleep.WITHOUT_CACHE)
        self._fleet.notify_scrape(worker)

    async def _get(self, worker: Worker) -> bytes:
        """Return the metrics of a worker; no bytes for a status other than 200."""
        timeout = aiohttp.ClientTimeout(total=self._settings.probe_timeout)
        async with self._session.get(
            f"{worker.url}/metrics", headers=worker.key.headers, timeout=timeout, allow_redirects=False
        ) as response:
            worker.key.record_status("/metrics", response.status)
            return await read_answer(response, self._settings.max_answer_bytes) if response.status == 200 else b""

    def _in_flight(self, worker: Worker) -> Counter[int]:
        """Return the requests in flight on each rank: this router's and those of other routers."""
        return worker.health.in_flight() + self._peer_load(worker.url, worker.ranks())
