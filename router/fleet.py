"""The workers: what each one is, whether it answers, and keeping the indexer told of their streams."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import aiohttp
import structlog

from indexer import Indexer, Registration, Target
from router.discovery import DiscoveryError, ServedModel, WorkerDescription, describe_worker
from router.settings import FleetSettings, WorkerSettings

log = structlog.get_logger()


@dataclass(eq=False, slots=True)
class Worker:
    """One server. `problem` says why it is not used; None while it answers."""

    settings: WorkerSettings
    description: WorkerDescription | None = None
    problem: str | None = "not asked yet"
    failed_probes: int = 0
    targets: set[Target] = field(default_factory=set)

    @property
    def url(self) -> str:
        """The worker's base URL, which is also its name."""
        return str(self.settings.url).rstrip("/")

    @property
    def up(self) -> bool:
        return self.problem is None

    def served(self, name: str) -> ServedModel | None:
        """What this worker serves under a name."""
        return self.description.models.get(name) if self.description else None

    @property
    def capacity_tokens(self) -> int | None:
        """How many tokens each of its ranks can hold, if it says so."""
        known = self.description
        return known.capacity * known.block_size if known and known.capacity and known.block_size else None

    def ranks(self) -> tuple[int, ...]:
        """Its DP ranks."""
        return self.description.ranks if self.description else (0,)


class Fleet:
    """Watches the configured workers. `start` and `stop` own its tasks.

    `on_model` is told of every model of a worker that answers, each time it does.
    """

    def __init__(
        self,
        workers: list[WorkerSettings],
        settings: FleetSettings,
        indexer: Indexer,
        session: aiohttp.ClientSession,
        on_model: Callable[[Worker, ServedModel], Awaitable[None]],
    ) -> None:
        self.workers = [Worker(worker) for worker in workers]
        self._settings = settings
        self._indexer = indexer
        self._session = session
        self._on_model = on_model
        self._tasks: list[asyncio.Task[None]] = []
        self._look_now = {worker: asyncio.Event() for worker in self.workers}

    async def start(self) -> None:
        """Ask every worker once, then go on watching them."""
        await asyncio.gather(*map(self._look, self.workers))
        self._tasks = [asyncio.create_task(self._watch(worker), name=f"watch {worker.url}") for worker in self.workers]

    async def stop(self) -> None:
        """End the watching."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def serving(self, name: str) -> list[tuple[Worker, ServedModel]]:
        """The workers that serve a model or adapter of this name, up or not."""
        return [(worker, served) for worker in self.workers if (served := worker.served(name)) is not None]

    def names(self) -> set[str]:
        """Every name a request may use."""
        return {name for worker in self.workers if worker.description for name in worker.description.models}

    def report_failure(self, worker: Worker, problem: str) -> None:
        """A request could not reach a worker: leave it out until it answers again."""
        if worker.up:
            log.warning("worker left out", worker=worker.url, reason=problem)
        worker.problem = problem
        self.look_soon(worker)

    def look_soon(self, worker: Worker) -> None:
        """Something went wrong with a worker: see whether it still answers."""
        self._look_now[worker].set()

    async def _watch(self, worker: Worker) -> None:
        while True:
            well = worker.up and not worker.failed_probes
            interval = self._settings.probe_interval if well else self._settings.retry_interval
            try:
                await asyncio.wait_for(self._look_now[worker].wait(), interval)
                self._look_now[worker].clear()
                await asyncio.sleep(self._settings.retry_interval)
            except TimeoutError:
                pass
            await self._look(worker)

    async def _look(self, worker: Worker) -> None:
        """Ask a worker what it is, and act on what changed."""
        try:
            async with asyncio.timeout(self._settings.probe_timeout):
                description = await describe_worker(self._session, worker.settings)
        except (DiscoveryError, TimeoutError) as error:
            problem = str(error) or f"no answer within {self._settings.probe_timeout} s"
            worker.failed_probes += 1
            if worker.problem is None and worker.failed_probes < self._settings.failed_probes:
                return  # a busy worker may be late once
            if worker.problem is None or worker.failed_probes == 1:
                log.warning("worker does not answer", worker=worker.url, reason=problem)
            worker.problem = problem
            return
        worker.failed_probes = 0
        if not worker.up:
            log.info("worker answers", worker=worker.url, engine=description.engine, models=list(description.models))
        if description != worker.description:
            self._register(worker, description)
        worker.description = description
        worker.problem = None
        for model in description.base_models():
            await self._on_model(worker, model)

    def _register(self, worker: Worker, description: WorkerDescription) -> None:
        """Tell the indexer of a worker's streams as they are now."""
        streams = {source.dp_rank: source for source in description.streams}
        registrations = [
            Registration(
                Target(worker.url, rank, model),
                streams.get(rank),
                description.engine,
                description.block_size,
                capacity=description.capacity,
            )
            for model in {served.model for served in description.base_models()}
            for rank in description.ranks
        ]
        targets = {registration.target for registration in registrations}
        self._indexer.unregister(worker.targets - targets)
        worker.targets = targets
        for registration in registrations:
            try:
                self._indexer.register(registration)
            except ValueError as error:
                log.error("event stream not followed", worker=worker.url, reason=str(error))
