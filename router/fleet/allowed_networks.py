"""Which addresses a worker may be registered at: the router would otherwise fetch whatever it is pointed to."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import urlsplit

_RESOLVE_TIMEOUT = 5.0
# Where clouds hand out credentials; the others of these addresses are link-local.
_METADATA = frozenset(map(ip_address, ("fd00:ec2::254", "100.100.100.200")))

Address = IPv4Address | IPv6Address


class AddressNotAllowedError(Exception):
    """An address that is outside the allowed networks, or that cannot be found; the message says which."""


async def check_address(url: str, networks: Iterable[str]) -> None:
    """See that every address of a URL's host is allowed. Raises AddressNotAllowedError."""
    host = urlsplit(url).hostname
    if not host:
        raise AddressNotAllowedError(f"{url} names no host")
    allowed = [ip_network(network) for network in networks]
    for address in await _resolve(host):
        if is_never_allowed(address) or not any(address in network for network in allowed):
            named = host if host == str(address) else f"{host} ({address})"
            raise AddressNotAllowedError(f"{named} is outside the networks of fleet.allowed_networks")


def is_never_allowed(address: Address) -> bool:
    """Whether no setting can allow an address: link-local ones, metadata services, and what is no single host."""
    return address.is_link_local or address.is_multicast or address.is_unspecified or address in _METADATA


async def _resolve(host: str) -> list[Address]:
    try:
        async with asyncio.timeout(_RESOLVE_TIMEOUT):
            found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise AddressNotAllowedError(f"{host} cannot be resolved: {error or 'no answer in time'}") from error
    return [_unwrapped(ip_address(address[0])) for *_, address in found]


def _unwrapped(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one."""
    return (isinstance(address, IPv6Address) and address.ipv4_mapped) or address
