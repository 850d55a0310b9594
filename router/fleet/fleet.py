"""The workers: which there are, whether they answer, and registering their streams with the indexer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import aiohttp
import structlog

from indexer import Indexer, Registration, Target
from router.fleet.allowed_networks import AllowedNetworks
from router.fleet.circuit import CircuitLimits
from router.fleet.discovery import DiscoveryError, ServedModel, WorkerDescription, describe_worker
from router.fleet.engine_metrics import EngineMetrics, Sleep
from router.fleet.health import Health
from router.fleet.stall_detector import StallDetector
from router.fleet.stream_addresses import allowed_sources
from router.fleet.worker import Worker, WorkerState, url_of
from router.http.client import connection_problem, read_answer
from router.http.event_loop import end_tasks
from router.http.worker_url import host_of, split_user_info
from router.settings import FleetSettings, Role, WorkerSettings

__all__ = ["Fleet", "Worker", "WorkerState"]

log = structlog.get_logger()

# Where workers come from; of two that name the same worker the first wins.
SOURCES = ("config", "api", "kubernetes")

_STALE_SCRAPES = 5
# Names that are remembered after their workers are gone.
_MOST_EXPECTED = 10_000


class Fleet:
    """Watches the workers of all sources. `start` and `stop` own its tasks.

    `on_model` is called for every model of a worker that answers, each time it does; `on_removed` for each that is
    gone; `on_replaced` for each that serves another model under a name; `on_cache_lost` for each that fell asleep and
    keeps no cache; `on_change` whenever more may be known of a worker, or it may take more than before; `on_scrape` for
    each whose metrics were read; `on_key` for each whose API key is another one. `networks`: where it may connect to on
    a stranger's word. `keys_for_added`: workers that were added over HTTP get the fleet's key too. `peer_load`: the
    requests that each of some ranks of a worker has from other routers. `aliases`: the models behind other names.
    """

    def __init__(
        self,
        workers: Iterable[WorkerSettings],
        settings: FleetSettings,
        indexer: Indexer,
        session: aiohttp.ClientSession,
        on_model: Callable[[Worker, ServedModel], Awaitable[None]],
        networks: AllowedNetworks | None = None,
        keys_for_added: bool = False,
        aliases: Mapping[str, str] = {},
        expected: Iterable[str] | None = None,
    ) -> None:
        """`expected`: models whose requests may wait for a worker; None: none may."""
        self.disaggregated = False  # some workers only compute prompts, or only go on from there
        self.aliases = aliases
        self._expected = None if expected is None else set(expected)
        self.version = 0  # grows whenever other workers may get requests, or for other names
        self.health_version = 0  # grows whenever a circuit opens or closes, and when a worker begins or ends to warm up
        self.on_removed: list[Callable[[Worker], None]] = []
        self.on_change: list[Callable[[], None]] = []
        self.on_replaced: list[Callable[[Worker], None]] = []
        self.on_cache_lost: list[Callable[[Worker], None]] = []
        self.on_scrape: list[Callable[[Worker], None]] = []
        self.on_key: list[Callable[[Worker], None]] = []
        self.peer_load: Callable[[str, Iterable[int]], Counter[int]] = lambda _, __: Counter()
        self._settings = settings
        self._indexer = indexer
        self._session = session
        self._on_model = on_model
        self._networks = networks or AllowedNetworks(settings.allowed_networks)
        self._limits = CircuitLimits(settings.failures, settings.backoff, settings.longest_backoff)
        self._keys_for_added = keys_for_added
        self._configured: dict[str, dict[str, WorkerSettings]] = {source: {} for source in SOURCES}
        self._workers: dict[str, Worker] = {}
        # Lookups in one version.
        self._lookup_version = -1
        self._able: dict[tuple[str | None, bool], list[Worker]] = {}
        self._models: dict[str, str] = {}
        self._tasks: dict[Worker, list[asyncio.Task[None]]] = {}
        self._stall_detector = StallDetector(settings, indexer)
        self._detecting: asyncio.Task[None] | None = None
        self._configure("config", workers)

    @property
    def workers(self) -> list[Worker]:
        """All workers, up or not."""
        return list(self._workers.values())

    def find(self, named: str) -> Worker | None:
        """The worker with this URL or this name."""
        worker = self._workers.get(split_user_info(named)[0].rstrip("/"))
        return worker or next((each for each in self._workers.values() if each.name == named), None)

    def key_of(self, url: str) -> bytes | None:
        """What the worker with this URL wants to be shown, as the value of `authorization`."""
        worker = self._workers.get(url)
        return worker.key.authorization if worker else None

    async def start(self) -> None:
        """Ask every worker once, then go on watching them."""
        await asyncio.gather(*map(self._probe, self.workers))
        for worker in self.workers:
            worker.warming_since = None  # all are new: none has to be spared
            self._health_changed()
            self._watch_from_now(worker)
        self._detecting = asyncio.create_task(self._stall_detector.run(lambda: self.workers), name="detect stalls")

    async def stop(self) -> None:
        """End the watching."""
        detecting = [self._detecting] if self._detecting else []
        await end_tasks([*detecting, *(task for tasks in self._tasks.values() for task in tasks)])
        self._tasks.clear()

    async def assign(self, source: str, workers: Iterable[WorkerSettings]) -> None:
        """Let these be the workers of a source. Others get no more requests; what they have goes on."""
        for worker in self._configure(source, workers):
            await end_tasks(self._tasks.pop(worker, []))
            self._indexer.unregister(worker.targets)
            for on_removed in self.on_removed:
                on_removed(worker)
            log.info("worker removed", worker=worker.name, source=worker.source)
        for worker in self.workers:
            if worker not in self._tasks and self._detecting is not None:  # else `start` does it
                log.info("worker added", worker=worker.name, source=worker.source)
                self._watch_from_now(worker)
        self._changed()

    def drain(self, worker: Worker, draining: bool) -> None:
        """Send a worker no new requests, or use it again."""
        worker.draining = draining
        self._changed()

    def set_asleep(self, worker: Worker, asleep: bool, keeps_cache: bool = True) -> None:
        """A worker's engine was put to sleep, and gets no requests, or it was woken."""
        if asleep and not keeps_cache:
            for on_cache_lost in self.on_cache_lost:
                on_cache_lost(worker)
        if worker.asleep is not asleep:
            worker.asleep = asleep
            log.info("worker asleep" if asleep else "worker awake", worker=worker.name)
            self._changed()

    def assigned(self, source: str) -> list[WorkerSettings]:
        """The workers that a source names."""
        return list(self._configured[source].values())

    def serving(self, name: str) -> list[tuple[Worker, ServedModel]]:
        """The workers that serve a model or adapter of this name, up or not."""
        return [(worker, served) for worker in self.workers if (served := worker.served(name)) is not None]

    def able(self, name: str | None, prefill: bool = False) -> Sequence[Worker]:
        """The workers that may get new requests for a name, as `Worker.takes` says, however their last ones went.

        Where no other is left, prefill workers that can answer alone.
        """
        if self._lookup_version != self.version:
            self._forget_lookups()
        able = self._able.get((name, prefill))
        if able is None:
            able = [worker for worker in self._workers.values() if worker.takes(name, prefill)]
            if not able and not prefill:
                able = [each for each in self._workers.values() if each.can_answer_alone and each.takes(name, True)]
            if able:  # else there is no end of such names
                self._able[name, prefill] = able
        return able

    def model_of(self, name: str) -> str | None:
        """The model behind the name of a model or adapter; None when no worker serves it."""
        if self._lookup_version != self.version:
            self._forget_lookups()
        if (model := self._models.get(name)) is not None:
            return model
        for worker in self._workers.values():
            if (served := worker.served(name)) is not None:
                self._models[name] = served.model
                return served.model
        return None

    def names(self) -> set[str]:
        """Every name a request may use."""
        names = {name for worker in self.workers if worker.description for name in worker.description.models}
        return names | {alias for alias, name in self.aliases.items() if name in names}

    def awaits(self, name: str) -> bool:
        """Whether a request for this name may wait for a worker: there is none, and one may come."""
        return self._expected is not None and name in self._expected and not self.able(name)

    def expected(self) -> set[str]:
        """The names that requests may wait for."""
        return set(self._expected or ())

    def report_failure(self, worker: Worker, problem: str) -> None:
        """A request could not reach a worker: it gets none until it answers again."""
        worker.problem = problem
        self._indexer.suspend(worker.targets)
        self.version += 1
        self.look_soon(worker)

    async def probe(self, worker: Worker) -> None:
        """Ask a worker at once what it is."""
        await self._probe(worker)

    def look_soon(self, worker: Worker) -> None:
        """Something went wrong with a worker: see whether it still answers."""
        worker.look_now.set()

    def _configure(self, source: str, workers: Iterable[WorkerSettings]) -> list[Worker]:
        """Set the workers of a source. Returns those that are gone."""
        self._configured[source] = {url_of(settings): settings for settings in workers}
        wanted: dict[str, tuple[str, WorkerSettings]] = {}
        for name in SOURCES:
            for url, given in self._configured[name].items():
                wanted.setdefault(url, (name, given))
        names = _names(wanted)
        # Who has another name is another one to all who look: its series end, and new ones begin.
        gone = [self._workers.pop(url) for url, worker in list(self._workers.items()) if names.get(url) != worker.name]
        for worker in gone:
            self._indexer.names.forget(worker.url)
        for url, (source_name, given) in wanted.items():
            if url not in self._workers:
                self._workers[url] = self._new_worker(given, source_name)
                self._workers[url].call(names[url])
                self._indexer.names.set(url, names[url])
            worker = self._workers[url]
            if worker.settings != given:
                worker.settle(given)
                self.look_soon(worker)
            worker.source = source_name
            shares_key = source_name != "api" or self._keys_for_added
            if worker.key.settle(worker.name, given, self._settings if shares_key else None):
                self._key_changed(worker)
        hosts = {source: {host_of(url) for url in given} for source, given in self._configured.items()}
        self._networks.guarded = frozenset(hosts["api"] - hosts["config"] - hosts["kubernetes"])
        self.version += 1
        return gone

    def _new_worker(self, given: WorkerSettings, source: str) -> Worker:
        stale = _STALE_SCRAPES * self._settings.metrics_interval
        slow_start = self._settings.slow_start
        return Worker(
            given, source, Health(self._limits, on_change=self._health_changed), EngineMetrics(stale), slow_start
        )

    def _watch_from_now(self, worker: Worker) -> None:
        self._tasks[worker] = [
            asyncio.create_task(self._watch(worker), name=f"watch {worker.name}"),
            asyncio.create_task(self._scrape(worker), name=f"scrape {worker.name}"),
        ]

    async def _watch(self, worker: Worker) -> None:
        if worker.state is WorkerState.NEW:
            await self._probe(worker)
        while True:
            well = worker.up and not worker.failed_probes
            interval = self._settings.probe_interval if well else self._settings.retry_interval
            try:
                await asyncio.wait_for(worker.look_now.wait(), interval)
                worker.look_now.clear()
                await asyncio.sleep(self._settings.retry_interval)
            except TimeoutError:
                pass
            await self._probe(worker)

    async def _scrape(self, worker: Worker) -> None:
        """Ask a worker for its metrics, again and again. Any answer is a sign of life."""
        url, timeout = f"{worker.url}/metrics", aiohttp.ClientTimeout(total=self._settings.probe_timeout)
        while True:
            before = self._in_flight(worker)
            worker.metrics.asked()
            try:
                async with self._session.get(
                    url, headers=worker.key.headers, timeout=timeout, allow_redirects=False
                ) as response:
                    worker.key.answered("/metrics", response.status)
                    answered = response.status == 200
                    body = await read_answer(response, self._settings.max_answer_bytes) if answered else b""
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                log.debug("no metrics", worker=worker.name, reason=connection_problem(error))
            else:
                worker.metrics.answered()
                worker.metrics.read(body.decode(errors="replace"), before | self._in_flight(worker))
                if (sleep := worker.metrics.sleep) is not None and not worker.sleep_in_change:
                    self.set_asleep(worker, sleep is not Sleep.AWAKE, sleep is not Sleep.WITHOUT_CACHE)
                for on_scrape in self.on_scrape:
                    on_scrape(worker)
                self._notify_changed()
            await asyncio.sleep(self._settings.metrics_interval)

    def _in_flight(self, worker: Worker) -> Counter[int]:
        """The requests that are known of, by rank."""
        return worker.health.in_flight() + self.peer_load(worker.url, worker.ranks())

    async def _probe(self, worker: Worker) -> None:
        """Ask a worker what it is, and act on what changed."""
        if worker.key.read():  # in a file that may have changed
            self._key_changed(worker)
        try:
            async with asyncio.timeout(self._settings.probe_timeout):
                description = await describe_worker(self._session, worker.settings, self._settings, worker.key)
                description = await self._with_allowed_streams(worker, description)
        except (DiscoveryError, TimeoutError) as error:
            worker.failed_probes += 1
            if worker.up and worker.failed_probes < self._settings.failed_probes:
                return  # a busy worker may be late once
            worker.problem = str(error) or f"no answer within {self._settings.probe_timeout} s"
            self._indexer.suspend(worker.targets)
            worker.health.give_up_waiting()
            self._changed()
            return
        if description != worker.description:
            self._register(worker, description)
        if not worker.up and (worker.failed_probes or worker.description is None):
            worker.warming_since = worker.health.clock()
            worker.health.forget()
            worker.restarted()
            self._health_changed()
        elif worker.warming_since is not None and worker.share >= 1:
            worker.warming_since = None
            self._health_changed()
        worker.failed_probes = 0
        if not worker.up:
            self._indexer.suspend(worker.targets, False)
        if not worker.up or description != worker.description:
            changes = len(worker.changed_models), *worker.changed_models.values()
            worker.describe(description)
            if changes != (len(worker.changed_models), *worker.changed_models.values()):
                log.warning("another model behind a name", worker=worker.name, models=worker.recent_changes())
                for on_replaced in self.on_replaced:
                    on_replaced(worker)
            worker.problem = None
            if self._expected is not None and len(self._expected) < _MOST_EXPECTED:
                self._expected.update(description.models)
            self._changed()
        for model in description.base_models():
            await self._on_model(worker, model)
        self._notify_changed()

    async def _with_allowed_streams(self, worker: Worker, description: WorkerDescription) -> WorkerDescription:
        """A description without the streams that the router must not connect to."""
        named_by_operator = worker.source != "api"
        if named_by_operator and worker.settings.streams is not None:
            return description
        own_host = host_of(worker.url) if named_by_operator else None
        allowed, refused = await allowed_sources(self._networks, description.streams, own_host)
        if refused and (worker.description is None or worker.description.refused != description.refused):
            log.warning("event streams not followed", worker=worker.name, reasons=refused)
        return replace(description, streams=tuple(allowed), refused=(*description.refused, *refused))

    def _key_changed(self, worker: Worker) -> None:
        for on_key in self.on_key:
            on_key(worker)

    def _forget_lookups(self) -> None:
        self._lookup_version = self.version
        self._able.clear()
        self._models.clear()

    def _health_changed(self) -> None:
        self.health_version += 1

    def _changed(self) -> None:
        """Other workers may get requests."""
        self.version += 1
        self.disaggregated = any(worker.role is not Role.BOTH for worker in self._workers.values())
        self._notify_changed()

    def _notify_changed(self) -> None:
        for on_change in self.on_change:
            on_change()

    def _register(self, worker: Worker, description: WorkerDescription) -> None:
        """Register a worker's streams as they are now."""
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
                log.error("event stream not followed", worker=worker.name, reason=str(error))


def _names(wanted: dict[str, tuple[str, WorkerSettings]]) -> dict[str, str]:
    """What workers are called, by their URLs. A name that another one has already is not used."""
    taken: set[str] = set()
    names: dict[str, str] = {}
    for url, (source, given) in wanted.items():
        name = given.name or url
        if name in taken:
            log.warning("two workers of one name: the later is called by its URL", name=name, worker=url, source=source)
            name = url
        taken.add(name)
        names[url] = name
    return names
