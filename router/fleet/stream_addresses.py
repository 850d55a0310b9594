"""Where event streams are connected to that are named by others than whoever runs the router.

ZeroMQ resolves names itself, whenever it connects. So a name is resolved and checked here, the address stands in its
place, and it is resolved again with each look at its worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvevents import EventSource
from kvevents.endpoints import Endpoint, parse_endpoint
from router.fleet.allowed_networks import AddressNotAllowedError, AllowedNetworks


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
