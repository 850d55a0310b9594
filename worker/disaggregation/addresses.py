"""Addresses as one string of host and port, also for IPv6: `10.0.0.7:8998`, `[fd00::7]:8998`."""

from __future__ import annotations


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
