"""Many concurrent streams: python -m benchmarks.proxy.streams URL STREAMS prints the times to their first events."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from statistics import median, quantiles

import uvloop
from yarl import URL

from benchmarks.machine import LOAD_CORE, pin
from benchmarks.proxy.load import LoadError
from benchmarks.proxy.prompts import PATH, bodies
from benchmarks.proxy.raw_worker import STREAM_ENDS

_DEADLINE = 60.0


@dataclass(frozen=True, slots=True)
class Streamed:
    """The seconds to the first event, and of the whole stream."""

    p50: float
    p99: float
    whole: float


def streamed(url: str, streams: int) -> Streamed:
    """Request `streams` concurrent streams. Raises LoadError if one is incomplete."""
    command = [sys.executable, "-m", "benchmarks.proxy.streams", url, str(streams)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * _DEADLINE, check=False)
    if done.returncode:
        raise LoadError(f"{url}: {done.stderr[-2000:]}")
    return Streamed(**json.loads(done.stdout))


class _Client(asyncio.Protocol):
    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self.first: float | None = None
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._sent = time.perf_counter()
        transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        if self.first is None and b"data:" in data:
            self.first = time.perf_counter() - self._sent
        self._tail = (self._tail + data)[-64:]
        if self._tail.endswith(STREAM_ENDS) and not self.over.done():
            self.over.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.over.done():
            self.over.set_exception(exc or ConnectionError("the connection was closed before the end"))


async def _streams(url: str, count: int) -> None:
    address = URL(url)
    head = f"POST {PATH} HTTP/1.1\r\nhost: {address.authority}\r\ncontent-type: application/json\r\n".encode()
    made = bodies(1024, stream=True)
    loop, began = asyncio.get_running_loop(), time.perf_counter()
    clients = []
    for number in range(count):
        body = made[number % len(made)]
        client = _Client(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await loop.create_connection(lambda client=client: client, address.host or "", address.port or 80)  # type: ignore[misc]
        clients.append(client)
    async with asyncio.timeout(_DEADLINE):
        await asyncio.gather(*(client.over for client in clients))
    firsts = [client.first for client in clients if client.first is not None]
    whole = time.perf_counter() - began
    print(json.dumps({"p50": median(firsts), "p99": quantiles(firsts, n=100)[98], "whole": whole}))


if __name__ == "__main__":
    pin(LOAD_CORE)
    uvloop.run(_streams(sys.argv[1], int(sys.argv[2])))
