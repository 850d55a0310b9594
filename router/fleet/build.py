"""The fleet of the settings, and the tasks that keep it current while the router runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable

import aiohttp

from indexer import Indexer
from router.fleet.allowed_networks import AllowedNetworks
from router.fleet.discovery import ServedModel
from router.fleet.event_streams import PublisherNames, WorkerStreams
from router.fleet.fleet import Fleet
from router.fleet.kubernetes import ClusterAccess
from router.fleet.prober import MetricsScraper, Prober
from router.fleet.source_watch import follow_kubernetes, follow_settings_file
from router.fleet.stall_detector import StallDetector
from router.fleet.worker import Worker
from router.fleet.worker_sources import DECLARED_SOURCE
from router.http.event_loop import end_tasks
from router.settings import FleetSettings, Settings, SettingsFile

_STREAM_CHECK_INTERVAL = 0.1
_REMOVED_CHECK_INTERVAL = 0.25


def _no_peer_load(_: str, __: Iterable[int]) -> Counter[int]:
    return Counter()


class FleetWatch:
    """The prober, the metrics scraper and the stall detector of a fleet. `start` and `stop` own their tasks.

    - `on_model`: called after every successful probe, for each base model of the worker.
    - `peer_load`: returns the requests of other routers on some ranks of the worker with a URL.
    """

    def __init__(
        self,
        fleet: Fleet,
        settings: FleetSettings,
        indexer: Indexer,
        session: aiohttp.ClientSession,
        networks: AllowedNetworks,
        on_model: Callable[[Worker, ServedModel], Awaitable[None]],
        peer_load: Callable[[str, Iterable[int]], Counter[int]] = _no_peer_load,
    ) -> None:
        self._fleet = fleet
        self._streams = WorkerStreams(indexer, networks)
        fleet.on_change.append(PublisherNames(indexer, fleet).update)
        self.prober = Prober(fleet, settings, session, self._streams, on_model)
        self._scraper = MetricsScraper(fleet, settings, session, peer_load)
        self._stall_detector = StallDetector(settings, indexer)
        self._tasks: dict[Worker, list[asyncio.Task[None]]] = {}
        self._leaving: dict[Worker, asyncio.Task[None]] = {}
        self._detecting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Probe every worker once, then watch them and those that are added later."""
        await self.prober.probe_all()
        for worker in self._fleet.workers:
            self._begin(worker)
        self._fleet.on_added.append(self._begin)
        self._fleet.on_removed.append(self._end)
        detecting = self._stall_detector.run(lambda: self._fleet.workers, lambda: list(self._leaving))
        self._detecting = asyncio.create_task(detecting, name="detect stalls")

    async def stop(self) -> None:
        """End all tasks, and wait until they have ended."""
        detecting = [self._detecting] if self._detecting else []
        watching = [task for tasks in self._tasks.values() for task in tasks]
        await end_tasks([*detecting, *watching, *self._leaving.values()])
        self._tasks.clear()

    def _begin(self, worker: Worker) -> None:
        if worker.source == DECLARED_SOURCE:
            return
        self._tasks[worker] = [
            asyncio.create_task(self.prober.watch(worker), name=f"probe {worker.name}"),
            asyncio.create_task(self._scraper.watch(worker), name=f"scrape {worker.name}"),
            asyncio.create_task(self._probe_after_breaks(worker), name=f"watch streams of {worker.name}"),
        ]

    async def _probe_after_breaks(self, worker: Worker) -> None:
        """Probe a worker soon after one of its event streams breaks, because the worker may have been restarted."""
        known = 0
        while True:
            breaks = self._streams.breaks(worker)
            if breaks > known:
                self._fleet.probe_soon(worker)
            known = breaks
            await asyncio.sleep(_STREAM_CHECK_INTERVAL)

    def _end(self, worker: Worker) -> None:
        self._leaving[worker] = asyncio.create_task(self._finish(worker), name=f"finish {worker.name}")

    async def _finish(self, worker: Worker) -> None:
        """Watch a removed worker until its last request has ended."""
        while worker.health.attempts:  # noqa: ASYNC110 - most workers have none by now
            await asyncio.sleep(_REMOVED_CHECK_INTERVAL)
        del self._leaving[worker]
        await end_tasks(self._tasks.pop(worker, []))


def build_fleet(settings: Settings, indexer: Indexer) -> Fleet:
    """Return the fleet of the settings' workers. Nothing probes them yet."""
    return Fleet(
        settings.workers,
        settings.fleet,
        indexer,
        keys_for_added=bool(settings.server.token),
        aliases=settings.aliases,
        expected=settings.models if settings.admission.cold_start_timeout else None,
    )


def follow_sources(
    settings: Settings, file: SettingsFile | None, session: aiohttp.ClientSession, fleet: Fleet
) -> list[asyncio.Task[None]]:
    """Start the tasks that add and remove workers as Kubernetes and the settings file, if any, name them."""
    tasks: list[asyncio.Task[None]] = []
    if settings.kubernetes.used:
        cluster = ClusterAccess.in_cluster(settings.kubernetes.namespace)
        tasks.append(asyncio.create_task(follow_kubernetes(settings.kubernetes, cluster, session, fleet)))
    if file is not None:
        tasks.append(asyncio.create_task(follow_settings_file(file, settings, fleet)))
    return tasks
