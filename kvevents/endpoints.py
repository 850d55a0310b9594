"""ZeroMQ endpoints: where a DP rank's stream is, and which side binds."""

from __future__ import annotations


def rank_endpoint(endpoint: str, dp_rank: int) -> str:
    """The endpoint of a DP rank, given rank 0's: the TCP port moves by the rank, other names get a suffix.

    Raises ValueError when a TCP endpoint has no port or the shifted port is out of range.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator or not rest:
        raise ValueError(f"endpoint {endpoint!r}: expected transport://address, such as tcp://127.0.0.1:5557")
    if scheme in ("inproc", "ipc"):
        return endpoint if dp_rank == 0 else f"{endpoint}_dp{dp_rank}"
    host, separator, port = rest.rpartition(":")
    if not separator or not port.isdigit():
        raise ValueError(f"endpoint {endpoint!r}: expected a port, such as tcp://127.0.0.1:5557")
    if port == "0":
        return endpoint  # any free port: nothing to offset
    shifted = int(port) + dp_rank
    if shifted > 65535:
        raise ValueError(f"endpoint {endpoint!r}: port {shifted} of DP rank {dp_rank} is above 65535")
    return f"{scheme}://{host}:{shifted}"


def publisher_binds(endpoint: str) -> bool:
    """Whether a publisher binds this endpoint (wildcards, ipc, inproc) or connects to it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def connectable(endpoint: str, host: str) -> str:
    """The endpoint a subscriber connects to: `host` in place of a wildcard address.

    `tcp://*:5557` and `tcp://0.0.0.0:5557` say where a publisher listens, not how to reach it.
    """
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    for wildcard in ("*", "0.0.0.0", "[::]"):
        prefix = f"tcp://{wildcard}:"
        if endpoint.startswith(prefix):
            return f"tcp://{host}:{endpoint.removeprefix(prefix)}"
    return endpoint
