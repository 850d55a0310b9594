"""ZeroMQ endpoints: how one is written, where a DP rank's stream is, and which side binds.

Only what has one meaning is an endpoint: `tcp://host:port`, `ipc://path` and `inproc://name`. ZeroMQ itself reads more,
such as `tcp://source:0;host:port`, which looks like one host and connects to another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address

_LONGEST_HOST = 253
_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?", re.ASCII)
_PORT = re.compile(r"0|[1-9][0-9]{0,4}", re.ASCII)
_LOCAL_NAME = re.compile(r"[!-~]{1,104}", re.ASCII)  # a Unix socket's path has at most 107 bytes, with what is added
_WILDCARDS = ("*", "0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A ZeroMQ endpoint. `address`: the host of a tcp endpoint (IPv6 without brackets), else the path or name."""

    scheme: str
    address: str
    port: int | None = None

    def __str__(self) -> str:
        if self.port is None:
            return f"{self.scheme}://{self.address}"
        return f"tcp://{bracketed(self.address)}:{self.port}"

    @property
    def is_wildcard(self) -> bool:
        """Whether it says where a publisher listens, and not how to reach it."""
        return self.scheme == "tcp" and self.address in _WILDCARDS


def parse_endpoint(text: str) -> Endpoint:
    """Read an endpoint; its text is then the only way to write it. Raises ValueError."""
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
    """Read a host as endpoints and URLs have it: an IPv4 address, an IPv6 address in brackets, or a DNS name.

    Returns its canonical form, without the brackets. Raises ValueError for anything else, numbers that resolvers would
    take as an address (`127.1`, `0x7f000001`) and zones of IPv6 addresses too.
    """
    try:
        if text.startswith("[") and text.endswith("]"):
            if "%" in text:
                raise ValueError(f"{_short(text)} has a zone: give an address that is the same everywhere")
            address = IPv6Address(text[1:-1])
            return str(address.ipv4_mapped or address)
        name = text.lower()
        labels = name.removesuffix(".").split(".")
        if labels[-1].isdigit() or labels[-1].startswith("0x"):
            return str(IPv4Address(text))
    except AddressValueError as error:
        raise ValueError(f"{_short(text)} is no IP address") from error
    if not text.isascii() or len(name) > _LONGEST_HOST or not all(map(_LABEL.fullmatch, labels)):
        raise ValueError(f"{_short(text)} is no host: give an IP address or a DNS name")
    return name


def bracketed(host: str) -> str:
    """A host as it stands before a port."""
    return f"[{host}]" if ":" in host else host


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """The endpoint of a DP rank, given rank 0's: the TCP port moves by the rank, other names get a suffix.

    Raises ValueError for what is no endpoint, and when the shifted port is out of range.
    """
    read = parse_endpoint(endpoint)
    if read.port is None:
        return endpoint if dp_rank == 0 else f"{endpoint}_dp{dp_rank}"
    if read.port == 0:
        return str(read)  # any free port: nothing to offset
    shifted = read.port + dp_rank
    if shifted > 65535:
        raise ValueError(f"endpoint {_short(endpoint)}: port {shifted} of DP rank {dp_rank} is above 65535")
    return str(Endpoint("tcp", read.address, shifted))


def publisher_binds(endpoint: str) -> bool:
    """Whether a publisher binds this endpoint (wildcards, ipc, inproc) or connects to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def connectable(endpoint: str, host: str) -> str:
    """The endpoint a subscriber connects to: `host` in place of a wildcard address. Raises ValueError.

    `tcp://*:5557` and `tcp://0.0.0.0:5557` say where a publisher listens, not how to reach it.
    """
    read = parse_endpoint(endpoint)
    if read.port == 0:
        raise ValueError(f"endpoint {_short(endpoint)}: nothing can be reached at port 0")
    return str(Endpoint("tcp", host.strip("[]"), read.port) if read.is_wildcard else read)


def _short(text: str) -> str:
    """What was given, for an error."""
    return repr(text if len(text) <= 100 else f"{text[:100]}…")
