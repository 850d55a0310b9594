"""The networks to which the router connects for addresses that its operator did not configure.

This concerns workers that are added over HTTP, and event streams. A host name is resolved and checked at every connect.
The connection is made to the checked address, because a name may resolve to another address the next time.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from aiohttp.abc import AbstractResolver, ResolveResult

_RESOLVE_TIMEOUT = 5.0
# Metadata services of clouds, which hand out credentials. Their other addresses are link-local.
_METADATA = frozenset(map(ip_address, ("fd00:ec2::254", "100.100.100.200")))

Address = IPv4Address | IPv6Address


class AddressNotAllowedError(OSError):
    """An address outside of the allowed networks, or a host that cannot be resolved. The message names it."""


class AllowedNetworks:
    """The networks of `fleet.allowed_networks`. `is_guarded`: the operator did not configure the host."""

    def __init__(self, networks: Iterable[str], is_guarded: Callable[[str], bool] = lambda _: False) -> None:
        self._networks = [ip_network(network) for network in networks]
        self.is_guarded = is_guarded

    async def check(self, host: str) -> list[Address]:
        """Return the addresses of a host, IPv4 first. Raises AddressNotAllowedError unless all of them are allowed."""
        addresses = await _resolve(host)
        for address in addresses:
            if is_never_allowed(address) or not any(address in network for network in self._networks):
                named = host if host == str(address) else f"{host} ({address})"
                raise AddressNotAllowedError(f"{named} is outside the networks of fleet.allowed_networks")
        return sorted(addresses, key=lambda address: address.version)

    async def to_connect(self, host: str) -> str:
        """Return the address to connect to: for a guarded host an allowed one. Raises AddressNotAllowedError."""
        return str((await self.check(host))[0]) if self.is_guarded(host) else host


class GuardedResolver(AbstractResolver):
    """A resolver for aiohttp that resolves guarded hosts to allowed addresses only."""

    def __init__(self, networks: AllowedNetworks, resolver: AbstractResolver) -> None:
        self._networks = networks
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Return the addresses of a host. Raises OSError, which aiohttp converts to its own error."""
        if not self._networks.is_guarded(host):
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
        """Close the resolver of the other hosts."""
        await self._resolver.close()


def is_never_allowed(address: Address) -> bool:
    """Return whether no setting can allow an address: link-local, multicast, unspecified, or a metadata service."""
    return address.is_link_local or address.is_multicast or address.is_unspecified or address in _METADATA


async def _resolve(host: str) -> list[Address]:
    try:
        async with asyncio.timeout(_RESOLVE_TIMEOUT):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise AddressNotAllowedError(f"{host} cannot be resolved: {error or 'no answer in time'}") from error
    return list(dict.fromkeys(_unwrapped(ip_address(address[0])) for *_, address in found))


def _unwrapped(address: Address) -> Address:
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address
