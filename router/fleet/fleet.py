"""The registry of workers: which workers exist, lookups by the names that requests use, and notification of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from indexer import Indexer
from router.apis.abilities import Ability
from router.fleet.circuit import CircuitLimits
from router.fleet.discovery import ServedModel
from router.fleet.engine_metrics import EngineMetrics
from router.fleet.health import FULL_SECONDS, Attempt, Health, Outcome
from router.fleet.worker import Worker
from router.fleet.worker_sources import ADDED_SOURCE, DECLARED_SOURCE, SourcedWorker, WorkerSources
from router.http.worker_url import split_user_info
from router.settings import FleetSettings, Role, WorkerSettings

log = structlog.get_logger()

# A scrape that is older than this number of intervals is ignored.
_STALE_SCRAPES = 5
# Maximum number of expected names, which are kept after their workers are removed.
_MOST_EXPECTED = 10_000


class Fleet:
    """The workers of all sources. Background tasks watch them: see `router/fleet/build.py`.

    - `disaggregated`: whether a worker computes only prefills or only decodes.
    - `encodes`: whether a worker encodes media items that the router sends it.
    - `unlike`: whether workers of one model have different abilities.
    - `aliases`: the model behind each additional name.
    - `may_be_full`: the workers among which those that are full are.
    - `declared`: the workers that are chosen for other programs only. The proxy sends them nothing.
    - `version`: incremented when other workers may receive requests, or the same workers under other names.
    - `health_version`: incremented when a circuit opens or closes, and when a worker begins or ends to warm up.

    Listeners are called with the worker, apart from those of `on_change`:
    - `on_added`, `on_removed`: a source named a new worker, or no longer names a worker.
    - `on_replaced`: a worker serves another model under a known name.
    - `on_cache_lost`: a worker dropped its cache, because of sleep, new weights or a flush.
    - `on_restarted`: a worker has a new process.
    - `on_full`: a worker refused a request because it is full.
    - `on_key`: the API key of a worker changed.
    - `on_scrape`: the metrics of a worker were read.
    - `on_change`: the state of workers changed, so that waiting requests may fit.
    """

    def __init__(
        self,
        workers: Iterable[WorkerSettings],
        settings: FleetSettings,
        indexer: Indexer,
        keys_for_added: bool = False,
        aliases: Mapping[str, str] = {},
        expected: Iterable[str] | None = None,
    ) -> None:
        """Create the fleet of the settings file's workers.

        - `indexer`: the index, in which targets of failed workers are suspended and those of removed ones unregistered.
        - `keys_for_added`: whether workers that were added over HTTP receive the fleet's API key.
        - `expected`: models whose requests may wait for a first worker; None: requests never wait for one.
        """
        self.disaggregated = False
        self.encodes = False
        self.unlike = False
        self.declared: list[Worker] = []
        self.aliases = aliases
        self.version = 0
        self.health_version = 0
        self.on_added: list[Callable[[Worker], None]] = []
        self.on_removed: list[Callable[[Worker], None]] = []
        self.on_replaced: list[Callable[[Worker], None]] = []
        self.on_cache_lost: list[Callable[[Worker], None]] = []
        self.on_restarted: list[Callable[[Worker], None]] = []
        self.on_full: list[Callable[[Worker], None]] = []
        self.on_key: list[Callable[[Worker], None]] = []
        self.on_scrape: list[Callable[[Worker], None]] = []
        self.on_change: list[Callable[[], None]] = []
        self._settings = settings
        self._indexer = indexer
        self._keys_for_added = keys_for_added
        self._expected = None if expected is None else set(expected)
        self._limits = CircuitLimits(settings.failures)
        self._sources = WorkerSources(workers)
        self._workers: dict[str, Worker] = {}
        self.may_be_full: set[Worker] = set()
        # Results of lookups in one version.
        self._lookup_version = -1
        self._able: dict[tuple[str | None, bool], list[Worker]] = {}
        self._encoders: dict[str, list[Worker]] = {}
        self._models: dict[str, str] = {}
        self._merge_sources()

    # Which workers exist

    @property
    def workers(self) -> list[Worker]:
        """All workers, reachable or not."""
        return list(self._workers.values())

    @property
    def generating(self) -> list[Worker]:
        """The workers that compute prompts or answers, reachable or not: all but encode workers."""
        return [worker for worker in self._workers.values() if worker.role is not Role.ENCODE]

    def find(self, named: str) -> Worker | None:
        """Return the worker with this URL or this name."""
        worker = self._workers.get(split_user_info(named)[0].rstrip("/"))
        return worker or next((each for each in self._workers.values() if each.name == named), None)

    def at(self, url: str) -> Worker | None:
        """Return the worker with this URL."""
        return self._workers.get(url)

    def key_of(self, url: str) -> bytes | None:
        """Return the value of `authorization` for the worker with this URL; None without an API key."""
        worker = self._workers.get(url)
        return worker.key.authorization if worker else None

    def assigned(self, source: str) -> list[WorkerSettings]:
        """Return the workers that a source names."""
        return self._sources.assigned(source)

    def is_untrusted_host(self, host: str) -> bool:
        """Return whether a host is known only from workers that were added over HTTP."""
        return self._sources.is_untrusted_host(host)

    def assign(self, source: str, workers: Iterable[WorkerSettings]) -> None:
        """Replace the workers of a source. Removed workers finish their requests and receive no new ones."""
        self._sources.assign(source, workers)
        removed, added = self._merge_sources()
        for worker in removed:
            self.may_be_full.discard(worker)
            self._indexer.unregister(worker.targets)
            for on_removed in self.on_removed:
                on_removed(worker)
            log.info("worker removed", worker=worker.name, source=worker.source)
        for worker in added:
            log.info("worker added", worker=worker.name, source=worker.source)
            for on_added in self.on_added:
                on_added(worker)
        self.changed()

    # Lookups by the names that requests use

    def able(self, name: str | None, prefill: bool = False) -> Sequence[Worker]:
        """Return the workers that may receive requests for a name (None: any), whatever their circuits.

        `prefill`: return prefill workers. If no worker can answer, prefill workers that can answer alone are returned.
        """
        if self._lookup_version != self.version:
            self._forget_lookups()
        able = self._able.get((name, prefill))
        if able is None:
            able = [worker for worker in self._workers.values() if worker.accepts(name, prefill)]
            if not able and not prefill:
                able = [each for each in self._workers.values() if each.can_answer_alone and each.accepts(name, True)]
            if able:  # Unknown names are not cached: their number has no limit.
                self._able[name, prefill] = able
        return able

    def encoders(self, name: str) -> Sequence[Worker]:
        """Return the encode workers that may receive media items of requests for a name, whatever their circuits."""
        if self._lookup_version != self.version:
            self._forget_lookups()
        encoders = self._encoders.get(name)
        if encoders is None:
            model = self.model_of(name)
            encoders = [worker for worker in self._workers.values() if worker.encodes_as(name, model) is not None]
            if encoders:
                self._encoders[name] = encoders
        return encoders

    def model_of(self, name: str) -> str | None:
        """Return the base model behind the name of a model or adapter; None if no worker serves the name."""
        if self._lookup_version != self.version:
            self._forget_lookups()
        if (model := self._models.get(name)) is not None:
            return model
        for worker in self._workers.values():
            if (served := worker.served(name)) is not None:
                self._models[name] = served.model
                return served.model
        return None

    def serving(self, name: str) -> list[tuple[Worker, ServedModel]]:
        """Return the workers that serve a model or adapter of this name, reachable or not."""
        return [(worker, served) for worker in self.workers if (served := worker.served(name)) is not None]

    def names(self) -> set[str]:
        """Return every name that requests may use."""
        names = {name for worker in self.generating if worker.description for name in worker.description.models}
        return names | {alias for alias, name in self.aliases.items() if name in names}

    def awaits(self, name: str, prefill: bool = False) -> bool:
        """Return whether a request for this name may wait for a first worker, or for a first prefill worker."""
        return self._expected is not None and name in self._expected and not self.able(name, prefill)

    def expected(self) -> set[str]:
        """Return the names whose requests may wait for a first worker."""
        return set(self._expected or ())

    def expect(self, names: Iterable[str]) -> None:
        """Let requests for these names wait for a worker in the future, if requests may wait at all."""
        if self._expected is not None and len(self._expected) < _MOST_EXPECTED:
            self._expected.update(names)

    # Changes of a worker's state

    def drain(self, worker: Worker, draining: bool) -> None:
        """Stop or resume sending new requests to a worker."""
        worker.draining = draining
        self.changed()

    def set_asleep(self, worker: Worker, asleep: bool, keeps_cache: bool = True) -> None:
        """Record that a worker's engine was put to sleep or woken. A sleeping worker receives no requests."""
        if asleep and not keeps_cache:
            self.notify_cache_lost(worker)
        if not asleep:
            worker.engine = replace(worker.engine, released=frozenset())
        if worker.asleep is not asleep:
            worker.asleep = asleep
            log.info("worker asleep" if asleep else "worker awake", worker=worker.name)
            self.changed()

    def report_failure(self, worker: Worker, problem: str) -> None:
        """Record that a request could not reach a worker: it receives no requests until a probe succeeds."""
        worker.problem = problem
        self._indexer.suspend(worker.targets)
        self.version += 1
        self.probe_soon(worker)

    def full(self) -> Collection[Worker]:
        """Return the workers that may receive no request now, because they are full or asked for a pause."""
        if not self.may_be_full:
            return ()
        full = [worker for worker in self.may_be_full if worker.health.full]
        if len(full) < len(self.may_be_full):
            self.may_be_full = {worker for worker in self.may_be_full if worker.health.counts_as_full}
        return full

    def refused(self, worker: Worker, attempt: Attempt, status: int, pause: float) -> bool:
        """Close a worker that refused a request as overloaded, and end the attempt if the worker is full.

        It is full if it has other requests, by this router's count or by its metrics. Otherwise the refusal may be a
        failure, and the caller ends the attempt.

        - `pause`: the seconds for which the worker asked for no requests; 0 without.
        """
        health = worker.health
        full = len(health.attempts) > 1 or worker.metrics.computes
        if pause:
            health.pause(pause)
        elif full:
            health.close()
        if full:
            attempt.end(Outcome.FULL, f"status {status}")
            for on_full in self.on_full:
                on_full(worker)
        if full or pause:
            self.may_be_full.add(worker)
            if pause or not health.attempts:
                asyncio.get_running_loop().call_later(pause or FULL_SECONDS, self.notify_change)
        return full

    def probe_soon(self, worker: Worker) -> None:
        """Probe a worker soon, because a request to it failed."""
        worker.probe_now.set()

    def name_refused(self, worker: Worker, name: str | None) -> None:
        """Record that a worker lacks a model or adapter. Others receive its requests until a probe is answered."""
        if name is not None and name not in worker.refused_names and worker.served(name) is not None:
            worker.refused_names.add(name)
            self.version += 1
        self.probe_soon(worker)

    def abilities_refused(self, worker: Worker, abilities: frozenset[Ability]) -> None:
        """Record what a worker lacks by its answer, until it is restarted. Others receive such requests."""
        if not abilities <= worker.lacks:
            worker.lacks |= abilities
            self.changed()

    def route_missing(self, worker: Worker, path: str, name: str | None) -> None:
        """Record that a worker's engine lacks a path, until it is restarted. Others receive such requests.

        `name`: the model of the refused request, if the answer may as well mean that; None if it is about the path.
        """
        known = worker.lacks_route(path, name)
        worker.note_missing_route(path, name)
        if not known:
            self.changed()

    def handover_refused(self, worker: Worker, path: str) -> None:
        """Record that a worker's engine refused to share a prompt with another worker on a path, until a restart."""
        if path not in worker.no_handover:
            worker.no_handover.add(path)
            self.changed()

    def connection_broken(self, url: str) -> None:
        """Probe a worker soon, because it closed an idle connection: it may have been restarted."""
        if (worker := self._workers.get(url)) is not None:
            self.probe_soon(worker)

    async def probe_again(self, worker: Worker) -> None:
        """Probe a worker soon, and return after the probe."""
        self.probe_soon(worker)
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settings.retry_interval + self._settings.probe_timeout):
                await worker.probed.wait()

    def changed(self) -> None:
        """Drop cached lookups and notify listeners: other workers may receive requests."""
        self.version += 1
        self.disaggregated = any(worker.role in (Role.PREFILL, Role.DECODE) for worker in self._workers.values())
        self.encodes = any(worker.encodes_items for worker in self._workers.values())
        self.unlike = _are_unlike(self.generating)
        self.notify_change()

    def health_changed(self) -> None:
        """Record that a circuit opened or closed, or that a worker began or ended to warm up."""
        self.health_version += 1

    def notify_change(self) -> None:
        """Notify listeners that waiting requests may fit."""
        for on_change in self.on_change:
            on_change()

    def notify_key(self, worker: Worker) -> None:
        """Notify listeners that the API key of a worker changed."""
        for on_key in self.on_key:
            on_key(worker)

    def notify_replaced(self, worker: Worker) -> None:
        """Notify listeners that a worker serves another model under a known name."""
        for on_replaced in self.on_replaced:
            on_replaced(worker)

    def notify_cache_lost(self, worker: Worker) -> None:
        """Notify listeners that a worker dropped its cache."""
        for on_cache_lost in self.on_cache_lost:
            on_cache_lost(worker)

    def notify_restarted(self, worker: Worker, since: float) -> None:
        """Forget what a worker held before its new process started, after `since`, and notify listeners."""
        self._indexer.forget_former_process(worker.targets, since)
        if worker.forget_refusals() | worker.forget_commands():
            self.changed()
        for on_restarted in self.on_restarted:
            on_restarted(worker)

    def notify_scrape(self, worker: Worker) -> None:
        """Notify listeners that the metrics of a worker were read."""
        for on_scrape in self.on_scrape:
            on_scrape(worker)
        self.notify_change()

    def _merge_sources(self) -> tuple[list[Worker], list[Worker]]:
        """Apply the merged sources. Return the removed and the added workers."""
        merged = self._sources.merged()
        # Treat a renamed worker as a new worker, so that its metric series restart.
        kept = {url for url, worker in self._workers.items() if url in merged and merged[url].name == worker.name}
        removed = [self._workers.pop(url) for url in list(self._workers) if url not in kept]
        for worker in removed:
            self._indexer.names.forget(worker.url)
        added = []
        for url, sourced in merged.items():
            if url not in self._workers:
                self._workers[url] = self._new_worker(sourced)
                self._indexer.names.set(url, sourced.name)
                added.append(self._workers[url])
            self._apply(self._workers[url], sourced)
        self.declared = [worker for worker in self._workers.values() if worker.source == DECLARED_SOURCE]
        self.version += 1
        return removed, added

    def _new_worker(self, sourced: SourcedWorker) -> Worker:
        health = Health(self._limits, on_change=self.health_changed)
        metrics = EngineMetrics(_STALE_SCRAPES * self._settings.metrics_interval)
        worker = Worker(sourced.settings, sourced.source, health, metrics, self._settings.slow_start)
        worker.set_name(sourced.name)
        return worker

    def _apply(self, worker: Worker, sourced: SourcedWorker) -> None:
        if worker.settings != sourced.settings:
            worker.apply_settings(sourced.settings)
            self.probe_soon(worker)
        worker.source = sourced.source
        shares_key = sourced.source != ADDED_SOURCE or self._keys_for_added
        if worker.key.apply(worker.name, sourced.settings, self._settings if shares_key else None):
            self.notify_key(worker)

    def _forget_lookups(self) -> None:
        self._lookup_version = self.version
        self._able.clear()
        self._encoders.clear()
        self._models.clear()


def _are_unlike(workers: Iterable[Worker]) -> bool:
    """Return whether workers of one model lack different abilities."""
    known = [worker for worker in workers if worker.description is not None]
    if not any(worker.lacks for worker in known):
        return False
    lacks: dict[str, set[frozenset[Ability]]] = {}
    for worker in known:
        for model in worker.models():
            lacks.setdefault(model, set()).add(worker.lacks)
    return any(len(found) > 1 for found in lacks.values())
