"""Workers as Envoy wants them named: ip:port. Host names are resolved, and again from time to time."""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import ip_address

from router.upstream import Origin

# How long an answer of the resolver is used.
_FRESH_SECONDS = 30.0


@dataclass(slots=True)
class _Known:
    address: str
    until: float


class Addresses:
    """Where workers are, by their URLs."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._asking: dict[str, asyncio.Task[str]] = {}

    def of(self, url: str) -> str | None:
        """A worker's address; None when it is to be `found` first. An old one is used while it is asked for anew."""
        if numeric := _numeric(url):
            return numeric
        known = self._known.get(url)
        if known is None:
            return None
        if known.until < time.monotonic():
            self._ask(url)
        return known.address

    async def found(self, url: str) -> str:
        """A worker's address. Raises OSError when its name is not known."""
        return self.of(url) or str(await asyncio.shield(self._ask(url)))

    def forget(self, url: str) -> None:
        """A worker is gone."""
        self._known.pop(url, None)

    async def close(self) -> None:
        """Ask no more."""
        asking = list(self._asking.values())
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    def _ask(self, url: str) -> asyncio.Task[str]:
        task = self._asking.get(url)
        if task is None:
            task = self._asking[url] = asyncio.create_task(self._resolve(url))
            task.add_done_callback(lambda done: (self._asking.pop(url, None), done.cancelled() or done.exception()))
        return task

    async def _resolve(self, url: str) -> str:
        origin = Origin.of(url)
        found = await asyncio.get_running_loop().getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
        found.sort(key=lambda each: each[0] != socket.AF_INET)  # engines listen there, if at only one of both
        address = _joined(str(found[0][4][0]), origin.port)
        self._known[url] = _Known(address, time.monotonic() + _FRESH_SECONDS)
        return address


@lru_cache(maxsize=4096)
def _numeric(url: str) -> str | None:
    """The address of a URL that names one."""
    origin = Origin.of(url)
    try:
        ip_address(origin.host)
    except ValueError:
        return None
    return _joined(origin.host, origin.port)


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
