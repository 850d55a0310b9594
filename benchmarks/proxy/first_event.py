"""One stream after another over one connection.

    python -m benchmarks.proxy.first_event URL WHAT COUNT

It prints the times to their first events.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from statistics import median

import uvloop
from yarl import URL

from benchmarks.machine import LOAD_CORE, pin
from benchmarks.proxy.load import LoadError
from benchmarks.proxy.prompts import PATH, one_token_streams, turns
from benchmarks.proxy.raw_worker import STREAM_ENDS

SHORT, LONG = "1 KB", "30k tokens, all but the last message seen"
_DEADLINE = 120.0
_WARM = 5  # uncounted requests


def first_event(url: str, what: str, count: int) -> float:
    """Return the median of the seconds to the first event. Raises LoadError."""
    command = [sys.executable, "-m", "benchmarks.proxy.first_event", url, what, str(count)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * _DEADLINE, check=False)
    if done.returncode:
        raise LoadError(f"{url}: {done.stderr[-2000:]}")
    return float(done.stdout)


class _Client(asyncio.Protocol):
    """A client that sends one request at a time."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    async def ask(self, request: bytes) -> float:
        """Send a request, and return the seconds to its first event after the end of the stream."""
        self._received, self._first = b"", 0.0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sent = time.perf_counter()
        self._transport.write(request)
        await self._over
        return self._first - sent

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._first and b"data:" in self._received:
            self._first = time.perf_counter()
        if self._received.endswith(STREAM_ENDS) and not self._over.done():
            if self._received.startswith(b"HTTP/1.1 200 "):
                self._over.set_result(None)
            else:
                self._over.set_exception(ConnectionError(self._received[:200].decode(errors="replace")))

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._over.done():
            self._over.set_exception(exc or ConnectionError("the connection was closed before the end"))


async def _ask(url: str, what: str, count: int) -> None:
    address = URL(url)
    head = f"POST {PATH} HTTP/1.1\r\nhost: {address.authority}\r\ncontent-type: application/json\r\n".encode()
    made = turns(30_000, count + _WARM) if what == LONG else one_token_streams(1024)
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(_Client, address.host or "", address.port or 80)
    seconds = []
    async with asyncio.timeout(_DEADLINE):
        for number in range(count + _WARM):
            body = made[number % len(made)]
            seconds.append(await client.ask(head + b"content-length: %d\r\n\r\n" % len(body) + body))
    print(median(seconds[_WARM:]))


if __name__ == "__main__":
    pin(LOAD_CORE)
    uvloop.run(_ask(sys.argv[1], sys.argv[2], int(sys.argv[3])))
