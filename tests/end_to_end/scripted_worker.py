"""A worker whose responses are scripted byte by byte, and which records every request."""

from __future__ import annotations

import asyncio
import json
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

MODEL = "m"


@dataclass
class Exchange:
    """A request, and the connection of its response. `connection` numbers the connections from 0."""

    method: str
    target: str
    headers: list[tuple[str, bytes]]
    body: bytes
    connection: int
    reader: StreamReader
    writer: StreamWriter

    def header(self, name: str) -> list[bytes]:
        """Return the values of a header."""
        return [value for known, value in self.headers if known == name]

    async def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, body: bytes = b"{}", status: str = "200 OK", headers: bytes = b"") -> None:
        """Send a complete response. `headers` end with line ends."""
        head = b"HTTP/1.1 %b\r\ncontent-length: %d\r\n%b\r\n" % (status.encode(), len(body), headers)
        await self.send(head if self.method == "HEAD" else head + body)

    async def begin_chunks(self, content_type: str = "text/event-stream") -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n"
        await self.send(head.encode())

    async def chunk(self, data: bytes) -> None:
        """Send a chunk. An empty one ends the response."""
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    async def hang_up(self) -> None:
        """Abort the connection."""
        self.writer.transport.abort()

    async def until_closed(self) -> None:
        """Wait until the router closes the connection."""
        with suppress(ConnectionError):
            assert await self.reader.read() == b""


Script = Callable[[Exchange], Awaitable[None]]


class ScriptedWorker:
    """A worker that serves the model `m` without events, and answers requests by its script.

    It answers the router's discovery itself, unless `answers_discovery` is False.
    With `silent_metrics` it never answers scrapes.
    `metrics` is the response to `/metrics`, `sources` that to `/kv_event_sources`; None answers 404.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.metrics: bytes | None = None
        self.sources: bytes | None = None
        self.models = [MODEL]
        self.silent_metrics = False
        self.answers_discovery = True
        self.exchanges: list[Exchange] = []
        self._server: asyncio.Server | None = None
        self._port = 0
        self._connections: list[asyncio.Task[None]] = []
        self._writers: list[StreamWriter] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def last(self) -> Exchange:
        return self.exchanges[-1]

    async def start(self) -> None:
        """Listen, after a stop at the same address."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close every connection and refuse new ones."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        for writer in self._writers:  # including those whose task has not started
            writer.transport.abort()
        await asyncio.sleep(0)

    def _accept(self, reader: StreamReader, writer: StreamWriter) -> None:
        if self._server is None or not self._server.is_serving():  # accepted as it was closed
            writer.transport.abort()
            return
        number = len(self._connections)
        self._writers.append(writer)
        self._connections.append(asyncio.create_task(self._serve(reader, writer, number)))

    async def _serve(self, reader: StreamReader, writer: StreamWriter, number: int) -> None:
        try:
            while exchange := await _receive(reader, writer, number):
                if not (self.answers_discovery and await self._answer_discovery(exchange)):
                    self.exchanges.append(exchange)
                    await self.script(exchange)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    async def _answer_discovery(self, exchange: Exchange) -> bool:
        """Answer a request of the router's discovery. Return False for any other request."""
        match exchange.method, exchange.target:
            case "GET", "/v1/models":
                await exchange.answer(json.dumps({"data": [{"id": model} for model in self.models]}).encode())
            case "GET", "/metrics" if self.silent_metrics:
                await asyncio.sleep(60)
            case "GET", "/metrics" if self.metrics is not None:
                await exchange.answer(self.metrics)
            case "GET", "/kv_event_sources" if self.sources is not None:
                await exchange.answer(self.sources)
            case ("GET", "/kv_event_sources" | "/server_info" | "/metrics") | (
                "POST",
                "/tokenize" | "/v1/chat/completions/render" | "/v1/completions/render",
            ):
                await exchange.answer(status="404 Not Found")
            case "POST", target if target.endswith("/render"):
                await exchange.answer(status="404 Not Found")
            case _:
                return False
        return True


@asynccontextmanager
async def scripted_worker(script: Script = Exchange.answer) -> AsyncIterator[ScriptedWorker]:
    """Run a worker."""
    async with scripted_workers(script) as [worker]:
        yield worker


@asynccontextmanager
async def scripted_workers(*scripts: Script) -> AsyncIterator[list[ScriptedWorker]]:
    """Run a worker for each script."""
    workers = [ScriptedWorker(script) for script in scripts]
    try:
        for worker in workers:
            await worker.start()
        yield workers
    finally:
        for worker in workers:
            await worker.stop()


async def _receive(reader: StreamReader, writer: StreamWriter, connection: int) -> Exchange | None:
    """Return the next request of a connection, or None at its end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head[:-4].split(b"\r\n")
    method, target, _ = first.decode("latin-1").split(" ")
    headers = [(name.decode().lower(), value) for name, _, value in (line.partition(b": ") for line in lines)]
    length = next((int(value) for name, value in headers if name == "content-length"), 0)
    return Exchange(method, target, headers, await reader.readexactly(length), connection, reader, writer)
