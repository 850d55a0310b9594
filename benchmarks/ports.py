"""Free ports of loopback that no outgoing connection receives, for benchmarks and tests."""

from __future__ import annotations

import socket
from secrets import randbelow

# Below the ports that systems give to outgoing connections.
_FIRST, _COUNT = 20_000, 12_000
_given: set[int] = set()


def free_port() -> int:
    """Return a port that this process has not received before."""
    return free_ports(1)[0]


def free_ports(count: int) -> range:
    """Return `count` consecutive ports."""
    while True:
        first = _FIRST + randbelow(_COUNT - count)
        ports = range(first, first + count)
        if _given.isdisjoint(ports) and all(_is_free(port) for port in ports):
            _given.update(ports)
            return ports


def _is_free(port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
