"""Host and port as one string, IPv6 too: `10.0.0.7:8998`, `[fd00::7]:8998`."""

from __future__ import annotations


def join_host_port(host: str, port: int | str) -> str:
    """`host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_host_port(address: str, field: str) -> tuple[str, int]:
    """The host, without brackets, and the port. Raises ValueError, naming the field, for anything else."""
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
    """ZeroMQ's name for it."""
    return f"tcp://{join_host_port(host, port)}"
