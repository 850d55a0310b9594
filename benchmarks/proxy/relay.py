"""A relay of bytes: python -m benchmarks.proxy.relay PORT WORKER_PORT…

It finds the end of requests and answers, and sends requests to the workers in turn. No router in Python can do less. It
has no timeouts, retries, flow control or metrics, and reads only the HTTP of the benchmark.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from itertools import cycle

import uvloop

from router.server.serving import keep_freed_memory

_END_OF_HEAD = b"\r\n\r\n"
_LENGTH = b"content-length:"
_QUICKACK: int | None = getattr(socket, "TCP_QUICKACK", None)


class _Worker:
    """The address of a worker, and its idle connections."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.idle: list[_Upstream] = []


class _Upstream(asyncio.Protocol):
    """A connection to a worker, whose bytes are forwarded to the client up to the end of an answer."""

    def __init__(self, worker: _Worker) -> None:
        self._worker = worker
        self._client: asyncio.Transport | None = None
        self._left: int | None = None  # remaining bytes of the answer; None before its head, negative for chunks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def send(self, request: bytes, client: asyncio.Transport) -> None:
        self._client, self._left = client, None
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        client, left = self._client, self._left
        if client is None:
            return
        if left is None:
            end = data.find(_END_OF_HEAD) + 4
            length = _length(data, end)
            left = -1 if length is None else length + end
            if length is None and _QUICKACK is not None:  # as in our router
                self._transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, _QUICKACK, 0)
        if left < 0:
            ended = data.endswith(b"0\r\n\r\n")
        else:
            left -= len(data)
            ended = left == 0
        self._left = left
        if ended:
            self._client = None
            self._worker.idle.append(self)
        client.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self in self._worker.idle:
            self._worker.idle.remove(self)
        if self._client is not None:
            self._client.close()


class _Client(asyncio.Protocol):
    """A client's connection. Whole requests are sent to the next worker."""

    def __init__(self, workers: Iterator[_Worker]) -> None:
        self._workers = workers
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._received:
            data = self._received + data
        end = data.find(_END_OF_HEAD) + 4
        if end < 4 or (_length(data, end) or 0) > len(data) - end:
            self._received = data
            return
        self._received = b""
        worker = next(self._workers)
        if worker.idle:
            worker.idle.pop().send(data, self._transport)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(worker, data))

    async def _connect(self, worker: _Worker, request: bytes) -> None:
        loop = asyncio.get_running_loop()
        _, upstream = await loop.create_connection(lambda: _Upstream(worker), "127.0.0.1", worker.port)
        upstream.send(request, self._transport)


def _length(data: bytes, end: int) -> int | None:
    """Return the length in a head that ends at `end`; `None` if it has none."""
    head = data[:end].lower()
    place = head.find(_LENGTH)
    return int(head[place + len(_LENGTH) : head.find(b"\r", place)]) if place >= 0 else None


async def _serve(port: int, workers: list[int]) -> None:
    turns = cycle([_Worker(each) for each in workers])
    server = await asyncio.get_running_loop().create_server(lambda: _Client(turns), "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    keep_freed_memory()
    uvloop.run(_serve(int(sys.argv[1]), [int(each) for each in sys.argv[2:]]))
