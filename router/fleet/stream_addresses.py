"""Where event streams are connected to that are named by others than whoever runs the router.

ZeroMQ resolves names itself, whenever it connects. So a name is resolved and checked here, the address stands in its
place, and it is resolved again with each look at its worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import structlog

from indexer import Indexer, Registration, Target
from kvevents import EventSource
from kvevents.endpoints import Endpoint, parse_endpoint
from kvevents.sources import canonical_source
from router.fleet.allowed_networks import AddressNotAllowedError, AllowedNetworks

log = structlog.get_logger()

_LOOK_SECONDS = 5.0


class RegisteredStreams:
    """Streams that are registered over HTTP: only allowed ones, and those with names at the addresses that these have
    now. `run` keeps it so."""

    def __init__(self, indexer: Indexer, networks: AllowedNetworks, look_seconds: float = _LOOK_SECONDS) -> None:
        self._indexer = indexer
        self._networks = networks
        self._look_seconds = look_seconds
        self._named: dict[Target, tuple[Registration, Registration]] = {}  # as given, and by address

    async def admit(self, registration: Registration) -> Registration:
        """The registration by address. Raises ValueError, which begins with the field, for what is not allowed."""
        if registration.source is None:
            return registration
        given = replace(registration, source=canonical_source(registration.source))
        resolved = await self._resolved(given)
        self._named.pop(given.target, None)
        if resolved != given:
            self._named[given.target] = given, resolved
        return resolved

    async def run(self) -> None:
        """Look where names lead now, until cancelled."""
        while True:
            await asyncio.sleep(self._look_seconds)
            current = {known.target: known for known in self._indexer.registered()} if self._named else {}
            for target, (given, before) in list(self._named.items()):
                if current.get(target) != before:
                    self._named.pop(target, None)  # it is gone, or another
                    continue
                try:
                    now = await self._resolved(given)
                    if now != before:
                        self._indexer.register(now)
                        self._named[target] = given, now
                except ValueError as error:
                    log.warning("a name of an event stream leads nowhere", worker=target.worker, reason=str(error))

    async def _resolved(self, given: Registration) -> Registration:
        assert given.source is not None
        return replace(given, source=await allowed_source(self._networks, given.source))


async def allowed_sources(
    networks: AllowedNetworks, sources: Sequence[EventSource], own_host: str | None = None
) -> tuple[list[EventSource], list[str]]:
    """The sources that may be connected to, by address, and in words why others may not.

    `own_host`: the host of a worker that whoever runs the router named; what is there is taken as it is.
    """
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
    """A source by address. `known`: what to connect to, by host, where that is settled.

    Raises ValueError, which begins with the field, for an endpoint that may not be connected to.
    """
    settled = {} if known is None else known
    replay = source.replay_endpoint
    return msgspec.structs.replace(
        source,
        endpoint=await _allowed(networks, source.endpoint, "endpoint", settled),
        replay_endpoint=None if replay is None else await _allowed(networks, replay, "replay_endpoint", settled),
    )


async def _allowed(networks: AllowedNetworks, text: str, field: str, known: dict[str, str]) -> str:
    endpoint = parse_endpoint(text)
    if endpoint.scheme != "tcp":
        raise ValueError(f"{field}: {text} is no tcp:// endpoint, and others are for whoever runs this alone")
    if endpoint.address not in known:
        try:
            known[endpoint.address] = str((await networks.check(endpoint.address))[0])
        except AddressNotAllowedError as error:
            raise ValueError(f"{field}: {error}") from error
    return str(Endpoint("tcp", known[endpoint.address], endpoint.port))
