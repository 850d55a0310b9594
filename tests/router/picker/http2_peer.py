"""A gRPC server of the picker's with methods for tests, and peers that speak HTTP/2 to it: as they should, or not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from struct import pack
from typing import Any

import h2.config
import h2.connection
import h2.events

from router.picker.grpc_server import Call, CallHandler, GrpcServer
from router.picker.http2 import frames

ECHO, SILENT, MANY, CRASH = "/t.T/Echo", "/t.T/Silent", "/t.T/Many", "/t.T/Crash"
LARGEST = 2**20
PATIENCE = 60.0


class Calls:
    """The methods, and the calls that are open."""

    def __init__(self) -> None:
        self.open: set[Any] = set()
        self._changed = asyncio.Event()
        self.ever = 0
        answers = {ECHO: 1, SILENT: 0, MANY: 100, CRASH: -1}
        self.methods = {path: partial(self._begin, answers=count) for path, count in answers.items()}

    async def until(self, met: Callable[[], bool]) -> None:
        """Wait until calls have begun or ended so that a condition is met."""
        async with asyncio.timeout(PATIENCE):
            while not met():
                self._changed.clear()
                await self._changed.wait()

    async def until_empty(self) -> None:
        await self.until(lambda: not self.open)

    def end(self, handler: CallHandler) -> None:
        self.open.remove(handler)
        self._changed.set()

    def _begin(self, call: Call, answers: int) -> CallHandler:
        self.ever += 1
        handler = _Handler(call, self, answers)
        self.open.add(handler)
        self._changed.set()
        return handler


@dataclass(eq=False)
class _Handler:
    _call: Call
    _calls: Calls
    _answers: int

    def received(self, message: bytes) -> None:
        if self._answers < 0:
            raise ValueError("as meant")
        for _ in range(self._answers):
            self._call.send(message)

    def peer_ended(self) -> None:
        self._call.end()

    def closed(self) -> None:
        self._calls.end(self)


@asynccontextmanager
async def grpc_server(stop_seconds: float = 0.0) -> AsyncIterator[tuple[Calls, int]]:
    calls = Calls()
    server = GrpcServer(calls.methods, LARGEST)
    port = await server.start("127.0.0.1", 0, None)
    try:
        yield calls, port
    finally:
        await server.stop(stop_seconds)
        assert not calls.open


def message(data: bytes) -> bytes:
    return pack(">BL", 0, len(data)) + data


def request(path: str, **more: str) -> list[tuple[str, str]]:
    headers = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "t", "te": "trailers"}
    return [*headers.items(), ("content-type", "application/grpc"), *more.items()]


class Peer:
    """A well-behaved client by the library h2, that can also send bytes of its own."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding="utf-8"))
        self.reader, self.writer = reader, writer
        self.events: list[Any] = []

    async def greet(self) -> None:
        self.h2.initiate_connection()
        await self.flush()
        await self.until(h2.events.SettingsAcknowledged)

    def open(self, path: str, *messages: bytes, ends: bool = False) -> int:
        """Open a stream; its number."""
        number = self.h2.get_next_available_stream_id()
        self.h2.send_headers(number, request(path), end_stream=ends and not messages)
        for place, each in enumerate(messages, 1):
            self.h2.send_data(number, message(each), end_stream=ends and place == len(messages))
        return int(number)

    async def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())
        await self.writer.drain()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def until(self, kind: type, number: int | None = None, credit: bool = True) -> Any:
        """Return the next event of a kind, and of a stream if given. `credit`: received data reopens windows."""
        async with asyncio.timeout(PATIENCE):
            while True:
                for place, event in enumerate(self.events):
                    if isinstance(event, kind) and number in (None, getattr(event, "stream_id", None)):
                        return self.events.pop(place)
                data = await self.reader.read(65536)
                if not data:
                    raise EOFError(f"the connection ended before {kind.__name__}")
                self.events += self.h2.receive_data(data)
                if credit:
                    for event in self.events:
                        if isinstance(event, h2.events.DataReceived) and event.flow_controlled_length:
                            self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                            event.flow_controlled_length = 0
                await self.flush()

    async def answer(self, number: int) -> tuple[bytes, dict[str, str]]:
        """The data of a stream's answer, and its trailers."""
        await self.until(h2.events.StreamEnded, number)
        data = b"".join(e.data for e in self._of(number, h2.events.DataReceived))
        heads = [*self._of(number, h2.events.ResponseReceived), *self._of(number, h2.events.TrailersReceived)]
        return data, {name: value for head in heads for name, value in head.headers}

    def _of(self, number: int, kind: type) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind) and e.stream_id == number]


@asynccontextmanager
async def peer(port: int) -> AsyncIterator[Peer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        found = Peer(reader, writer)
        await found.greet()
        yield found
    finally:
        writer.close()


@dataclass
class RawPeer:
    """A client that sends any bytes, and reads frames."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, *data: bytes) -> None:
        try:
            self.writer.write(b"".join(data))
            await self.writer.drain()
        except ConnectionError:
            pass  # the server may have closed already: what it said before is still to be read

    async def frame(self) -> tuple[int, int, int, bytes] | None:
        """The next one: kind, flags, stream and payload; None at the end."""
        try:
            async with asyncio.timeout(PATIENCE):
                high, low, kind, flags, number = frames.HEAD.unpack(await self.reader.readexactly(9))
                return kind, flags, number, await self.reader.readexactly(high << 16 | low)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def code(self) -> int | None:
        """With what the connection or a stream is ended; None when the connection just ends."""
        while (found := await self.frame()) is not None:
            kind, _, _, payload = found
            if kind == frames.GOAWAY:
                return int.from_bytes(payload[4:8], "big")
            if kind == frames.RST_STREAM:
                return int.from_bytes(payload, "big")
        return None


@asynccontextmanager
async def raw_peer(port: int, greet: bool = True) -> AsyncIterator[RawPeer]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        found = RawPeer(reader, writer)
        if greet:
            await found.send(frames.PREFACE, frames.settings({}))
        yield found
    finally:
        writer.close()
