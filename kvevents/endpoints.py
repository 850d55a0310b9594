"""ZeroMQ endpoints: their syntax, the endpoint of each DP rank, and the side that binds.

Only unambiguous endpoints are valid: `tcp://host:port`, `ipc://path` and `inproc://name`. ZeroMQ itself accepts more,
such as `tcp://source:0;host:port`, which looks like one host and connects to another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address

_LONGEST_HOST = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_PORT = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)
_LOCAL_NAME = re.compile(r"[!-~]{1,104}", re.ASCII)  # a Unix socket's path has at most 107 bytes, including a suffix
_WILDCARDS = ("*", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A ZeroMQ endpoint. `address` is the host of a tcp endpoint (IPv6 without brackets), else the path or name."""

    scheme: str
    address: str
    port: int | None = None

    def __str__(self) -> str:
        if self.port is None:
            return f"{self.scheme}://{self.address}"
        return f"tcp://{bracketed(self.address)}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """True for an address that a publisher listens on, but that subscribers cannot connect to."""
        return self.scheme == "tcp" and self.address in _WILDCARDS


def parse_endpoint(text: str) -> Endpoint:
    """Parse an endpoint. The text of the result is its canonical form. Raises ValueError."""
    scheme, separator, rest = text.partition("://")
    if scheme in ("ipc", "inproc") and _LOCAL_NAME.fullmatch(rest):
        return Endpoint(scheme, rest)
    if scheme != "tcp" or not separator:
        raise ValueError(f"endpoint {_short(text)}: expected transport://address, such as tcp://127.0.0.1:5557")
    host, _, port = rest.rpartition(":")
    if not _PORT.fullmatch(port) or int(port) > 65535:
        raise ValueError(f"endpoint {_short(text)}: expected a port, such as tcp://127.0.0.1:5557")
    try:
        return Endpoint(scheme, host if host == "*" else parse_host(host), int(port))
    except ValueError as error:
        raise ValueError(f"endpoint {_short(text)}: {error}") from error


def parse_host(text: str) -> str:
    """Parse a host: an IPv4 address, an IPv6 address in brackets, or a DNS name. Return it canonical, without brackets.

    Raises ValueError for anything else, also for numbers that resolvers accept (`127.1`, `0x7f000001`) and for zones.
    """
    try:
        if text.startswith("[") and text.endswith("]"):
            if "%" in text:
                raise ValueError(f"{_short(text)} has a zone: give an address that is valid on every machine")
            address = IPv6Address(text[1:-1])
            return str(address.ipv4_mapped or address)
        name = text.lower()
        labels = name.removesuffix(".").split(".")
        if labels[-1].isdigit() or labels[-1].startswith("0x"):
            return str(IPv4Address(text))
    except AddressValueError as error:
        raise ValueError(f"{_short(text)} is not an IP address") from error
    if not text.isascii() or len(name) > _LONGEST_HOST or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"{_short(text)} is not a host: give an IP address or a DNS name")
    return name


def bracketed(host: str) -> str:
    """Return a host in the form that precedes a port: IPv6 addresses get brackets."""
    return f"[{host}]" if ":" in host else host


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """Return a rank's endpoint, given rank 0's: a higher TCP port, or a suffix. Raises ValueError if it is invalid."""
    read = parse_endpoint(endpoint)
    if read.port is None:
        return endpoint if dp_rank == 0 else f"{endpoint}_dp{dp_rank}"
    if read.port == 0:
        return str(read)  # any free port, so no offset is needed
    shifted = read.port + dp_rank
    if shifted > 65535:
        raise ValueError(f"endpoint {_short(endpoint)}: port {shifted} of DP rank {dp_rank} is above 65535")
    return str(Endpoint("tcp", read.address, shifted))


def publisher_binds(endpoint: str) -> bool:
    """Return whether a publisher binds this endpoint (wildcards, ipc, inproc) and does not connect to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def connectable(endpoint: str, host: str) -> str:
    """Return the endpoint to connect to, with `host` in place of a wildcard (`*`, `0.0.0.0`). Raises ValueError."""
    read = parse_endpoint(endpoint)
    if read.port == 0:
        raise ValueError(f"endpoint {_short(endpoint)}: port 0 cannot be reached")
    return str(Endpoint("tcp", host.strip("[]"), read.port) if read.is_wildcard else read)


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}…")


def join_host_port(host: str, port: int | str) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str, field: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port. Raises ValueError, which names the field."""
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    unclear = not host or (":" in host) != bracketed or "[" in host or "]" in host
    if not colon or unclear or not port.isascii() or not port.isdigit():
        raise ValueError(f"{field} {address!r}: must be host:port, for IPv6 [address]:port")
    if not 0 < int(port) < 65536:
        raise ValueError(f"{field} {address!r}: the port must be between 1 and 65535")
    return host, int(port)


def tcp_endpoint(host: str, port: int | str) -> str:
    """Return the ZeroMQ endpoint of a host and port."""
    return f"tcp://{join_host_port(host, port)}"
