"""The event streams that the index follows: those that workers report, and those that are registered over HTTP.

ZeroMQ resolves host names itself at every connect, so a name could lead out of the allowed networks after its check.
Therefore names are resolved and checked here, and ZeroMQ connects to the checked address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec
import structlog

from indexer import Indexer, Registration, Target
from kvevents import EventSource
from kvevents.endpoints import Endpoint, parse_endpoint
from kvevents.sources import canonical_source
from router.fleet.allowed_networks import AddressNotAllowedError, AllowedNetworks
from router.fleet.discovery import WorkerDescription
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.fleet.worker_sources import ADDED_SOURCE
from router.http.worker_url import host_of
from router.settings import Role

log = structlog.get_logger()

_RESOLVE_INTERVAL = 5.0


class WorkerStreams:
    """Registers the event streams that workers report with the indexer."""

    def __init__(self, indexer: Indexer, networks: AllowedNetworks) -> None:
        self._indexer = indexer
        self._networks = networks

    async def without_refused(self, worker: Worker, description: WorkerDescription) -> WorkerDescription:
        """Return a worker's description without refused streams. Those that the operator configured are not checked."""
        configured = worker.source != ADDED_SOURCE
        if configured and worker.settings.streams is not None:
            return description
        own_host = host_of(worker.url) if configured else None
        allowed, refused = await allowed_sources(self._networks, description.streams, own_host)
        if refused and (worker.description is None or worker.description.refused != description.refused):
            log.warning("event streams not followed", worker=worker.name, reasons=refused)
        return replace(description, streams=tuple(allowed), refused=(*description.refused, *refused))

    def register(self, worker: Worker, description: WorkerDescription) -> None:
        """Register the streams of a description, and unregister the worker's targets that it does not list.

        An encode worker has no targets, because it holds no prefixes.
        """
        streams = {source.dp_rank: source for source in description.streams}
        models = {served.model for served in description.base_models()}
        if worker.role_with(description) is Role.ENCODE:
            models.clear()
        registrations = [
            Registration(
                Target(worker.url, rank, model),
                streams.get(rank),
                description.engine,
                description.block_size,
                capacity=description.capacity,
                pool_layout=description.pool_layout,
            )
            for model in models
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

    def breaks(self, worker: Worker) -> int:
        """Return how often the publishers of a worker's present streams disconnected."""
        streams = [self._indexer.stream(target) for target in worker.targets]
        return sum(stream.breaks for stream in streams if stream is not None)

    def suspend(self, worker: Worker) -> None:
        """Leave the worker's targets out of matches while it is down. Their blocks are kept."""
        self._indexer.suspend(worker.targets)

    def resume(self, worker: Worker) -> None:
        """Return the worker's targets to matches."""
        self._indexer.suspend(worker.targets, False)


@lru_cache(maxsize=1 << 14)
def _names_of(name: str, url: str) -> set[str]:
    """Return the names of a worker. They are read again after each change of the fleet."""
    return {name, url, url.partition("://")[2].partition("/")[0], host_of(url)}


class PublisherNames:
    """The names by which publishers that connect may call their workers: names, URLs, and addresses of one worker."""

    def __init__(self, indexer: Indexer, fleet: Fleet) -> None:
        self._indexer = indexer
        self._fleet = fleet
        self._version = -1

    def update(self) -> None:
        """Send the index the present names, if they may have changed."""
        if self._fleet.version == self._version:
            return
        self._version = self._fleet.version
        names: dict[str, str | None] = {}
        for worker in self._fleet.workers:
            for name in _names_of(worker.name, worker.url):
                names[name] = worker.url if names.setdefault(name, worker.url) == worker.url else None
        self._indexer.pods = {name: url for name, url in names.items() if url is not None}


class RegisteredStreams:
    """The event streams registered over HTTP. `run` resolves their host names to addresses at intervals."""

    def __init__(
        self, indexer: Indexer, networks: AllowedNetworks, resolve_interval: float = _RESOLVE_INTERVAL
    ) -> None:
        self._indexer = indexer
        self._networks = networks
        self._resolve_interval = resolve_interval
        self._named: dict[Target, tuple[Registration, Registration]] = {}  # with host names, and with addresses

    async def admit(self, registration: Registration) -> Registration:
        """Return a registration with addresses for host names. Raises ValueError (field first) if not allowed."""
        if registration.source is None:
            return registration
        given = replace(registration, source=canonical_source(registration.source))
        resolved = await self._resolved(given)
        self._named.pop(given.target, None)
        if resolved != given:
            self._named[given.target] = given, resolved
        return resolved

    async def run(self) -> None:
        """Resolve host names again at intervals, until cancelled."""
        while True:
            await asyncio.sleep(self._resolve_interval)
            current = {known.target: known for known in self._indexer.registered()} if self._named else {}
            for target, (given, before) in list(self._named.items()):
                if current.get(target) != before:
                    self._named.pop(target, None)  # It was unregistered or replaced.
                    continue
                try:
                    now = await self._resolved(given)
                    if now != before:
                        self._indexer.register(now)
                        self._named[target] = given, now
                except ValueError as error:
                    log.warning("host of an event stream not resolved", worker=target.worker, reason=str(error))

    async def _resolved(self, given: Registration) -> Registration:
        assert given.source is not None
        return replace(given, source=await allowed_source(self._networks, given.source))


def listens_elsewhere(url: str, endpoint: str) -> str:
    """Return in words that an endpoint is not at the host of its worker's URL; "" if it is."""
    there = parse_endpoint(endpoint)
    if there.scheme != "tcp" or there.is_wildcard or there.address == host_of(url):
        return ""
    return (
        f"; {there.address} is not the worker's host: unless its configuration says bind, an engine with this endpoint "
        "connects there and does not listen (tcp://*:PORT listens; events.bind lets engines connect to the router)"
    )


async def allowed_sources(
    networks: AllowedNetworks, sources: Sequence[EventSource], own_host: str | None = None
) -> tuple[list[EventSource], list[str]]:
    """Return the allowed sources, by address, and why others are refused. `own_host` is allowed without a check."""
    allowed: list[EventSource] = []
    refused: list[str] = []
    known: dict[str, str] = {} if own_host is None else {own_host: own_host}
    for source in sources:
        try:
            allowed.append(await allowed_source(networks, source, known))
        except ValueError as error:
            refused.append(f"the stream of rank {source.dp_rank}: {error}")
    return allowed, refused


async def allowed_source(
    networks: AllowedNetworks, source: EventSource, known: dict[str, str] | None = None
) -> EventSource:
    """Return a source with addresses for host names, which are kept in `known`. Raises ValueError as `admit` does."""
    checked = {} if known is None else known
    replay = source.replay_endpoint
    there = source.endpoint
    return msgspec.structs.replace(
        source,
        endpoint=there if source.connects else await _allowed(networks, there, "endpoint", checked),
        replay_endpoint=None if replay is None else await _allowed(networks, replay, "replay_endpoint", checked),
    )


async def _allowed(networks: AllowedNetworks, text: str, field: str, known: dict[str, str]) -> str:
    endpoint = parse_endpoint(text)
    if endpoint.scheme != "tcp":
        raise ValueError(f"{field}: {text} is not a tcp:// endpoint. Other transports can only be set in the settings")
    if endpoint.address not in known:
        try:
            known[endpoint.address] = str((await networks.check(endpoint.address))[0])
        except AddressNotAllowedError as error:
            raise ValueError(f"{field}: {error}") from error
    return str(Endpoint("tcp", known[endpoint.address], endpoint.port))
