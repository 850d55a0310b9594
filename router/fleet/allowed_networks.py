"""Which addresses the router connects to on a stranger's word: workers that are added over HTTP, and event streams.

A name is resolved and checked each time it is connected to, and what was checked is what is connected to: between two
questions a name may change what it stands for.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from aiohttp.abc import AbstractResolver, ResolveResult

_RESOLVE_TIMEOUT = 5.0
# Where clouds hand out credentials; the others of these addresses are link-local.
_METADATA = frozenset(map(ip_address, ("fd00:ec2::254", "100.100.100.200")))

Address = IPv4Address | IPv6Address


class AddressNotAllowedError(OSError):
    """An address that is outside the allowed networks, or that cannot be found; the message says which."""


class AllowedNetworks:
    """The networks of `fleet.allowed_networks`.

    `guarded`: the hosts that are checked whenever they are connected to. Others are named by whoever runs the router.
    """

    def __init__(self, networks: Iterable[str]) -> None:
        self._networks = [ip_network(network) for network in networks]
        self.guarded: frozenset[str] = frozenset()

    async def check(self, host: str) -> list[Address]:
        """The addresses of a host, all of them allowed; IPv4 first. Raises AddressNotAllowedError."""
        addresses = await _resolve(host)
        for address in addresses:
            if is_never_allowed(address) or not any(address in network for network in self._networks):
                named = host if host == str(address) else f"{host} ({address})"
                raise AddressNotAllowedError(f"{named} is outside the networks of fleet.allowed_networks")
        return sorted(addresses, key=lambda address: address.version)

    async def to_connect(self, host: str) -> str:
        """What to connect to for a host: itself, or an address of it that is allowed. Raises AddressNotAllowedError."""
        return str((await self.check(host))[0]) if host in self.guarded else host


class GuardedResolver(AbstractResolver):
    """Resolves names for aiohttp, those that are guarded to allowed addresses alone."""

    def __init__(self, networks: AllowedNetworks, resolver: AbstractResolver) -> None:
        self._networks = networks
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """The addresses of a host. Raises OSError, which aiohttp makes an error of its own."""
        if host not in self._networks.guarded:
            return await self._resolver.resolve(host, port, family)
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=0,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in await self._networks.check(host)
        ]

    async def close(self) -> None:
        """Close the resolver behind it."""
        await self._resolver.close()


def is_never_allowed(address: Address) -> bool:
    """Whether no setting can allow an address: link-local ones, metadata services, and what is no single host."""
    return address.is_link_local or address.is_multicast or address.is_unspecified or address in _METADATA


async def _resolve(host: str) -> list[Address]:
    try:
        async with asyncio.timeout(_RESOLVE_TIMEOUT):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise AddressNotAllowedError(f"{host} cannot be resolved: {error or 'no answer in time'}") from error
    return list(dict.fromkeys(_unwrapped(ip_address(address[0])) for *_, address in found))


def _unwrapped(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one."""
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address
