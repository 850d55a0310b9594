"""One event stream as a subscriber sees it: whether it is reached, and all that comes, under any topic."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from indexer.stream_monitor import Refused, monitor_of, read_monitor
from kvevents import BlockStored, EventBatch, EventSource, MalformedBatchError, decode_batch
from kvevents.curve import KeyPair, be_client, temporary_key_pair
from kvevents.frames import MalformedFrameError, parse_live, parse_replay, replay_request

CONNECT_TIMEOUT = 3.0  # seconds
REPLAY_TIMEOUT = 3.0
_QUEUE = 100_000  # messages


class UnreachableError(Exception):
    """Nothing answers at an address; the message says how it was tried."""


class NoPublisherError(Exception):
    """What answers at an address is no publisher."""


@dataclass(slots=True)
class Heard:
    """What came on a stream: batches by their number, topics, and what could not be read."""

    batches: list[tuple[int, float, EventBatch]] = field(default_factory=list)  # number, arrival (unix time), batch
    topics: set[str] = field(default_factory=set)
    unreadable: list[str] = field(default_factory=list)

    def stored(self) -> list[BlockStored]:
        return [event for _, _, batch in self.batches for event in batch.events if isinstance(event, BlockStored)]


class WatchedStream:
    """Follows a DP rank's stream in a task of its own, until `close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: EventSource, keys: KeyPair | None) -> None:
        self.source = source
        self.heard = Heard()
        self.arrived = asyncio.Event()  # set at every message
        self._context = context
        self._keys = keys
        self._socket = self._open(zmq.SUB)
        self._task: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Reach the publisher and begin to listen. Raises UnreachableError, NoPublisherError."""
        await reach(self.source.endpoint)
        self._socket.subscribe(b"")
        monitor = monitor_of(self._socket)
        try:
            self._socket.connect(self.source.endpoint)
            if not await asyncio.to_thread(monitor.poll, int(CONNECT_TIMEOUT * 1000)):
                raise NoPublisherError(f"{self.source.endpoint} accepts connections, but does not speak ZeroMQ")
            if isinstance(refused := read_monitor(monitor), Refused):
                raise NoPublisherError(f"{self.source.endpoint} is no publisher: {refused.reason}")
        finally:
            self._socket.disable_monitor()
            monitor.close(0)
        self._task = asyncio.create_task(self._follow())

    async def replayed(self) -> int:
        """How many batches the replay endpoint still has. Raises UnreachableError, NoPublisherError."""
        endpoint = self.source.replay_endpoint
        assert endpoint is not None
        await reach(endpoint)
        socket = self._open(zmq.DEALER)
        dealer = zmq.asyncio.Socket.shadow(socket)
        try:
            socket.connect(endpoint)
            await dealer.send_multipart(replay_request(0))
            count = 0
            while await dealer.poll(int(REPLAY_TIMEOUT * 1000)):
                if parse_replay(await dealer.recv_multipart()) is None:
                    return count
                count += 1
        except MalformedFrameError as error:
            raise NoPublisherError(f"{endpoint} answers a replay request with something else: {error}") from error
        finally:
            dealer.close(0)
            socket.close(0)
        raise NoPublisherError(f"{endpoint} is reached, but sends no end of a replay within {REPLAY_TIMEOUT:g} s")

    async def close(self) -> None:
        """Stop listening."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._socket.close(0)

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(_QUEUE)
        socket.setsockopt(zmq.IPV6, "[" in self.source.endpoint)
        if self.source.curve_server_key is not None:
            be_client(socket, self.source.curve_server_key, self._keys or temporary_key_pair())
        return socket

    async def _follow(self) -> None:
        socket = zmq.asyncio.Socket.shadow(self._socket)
        while True:
            frames = await socket.recv_multipart()
            self.heard.topics.add(frames[0].decode(errors="replace"))
            try:
                frame = parse_live(frames)
                batch = decode_batch(frame.payload)
            except (MalformedFrameError, MalformedBatchError) as error:
                self.heard.unreadable.append(str(error))
            else:
                self.heard.batches.append((frame.seq, time.time(), batch))
                self.heard.unreadable += [rejected.reason for rejected in batch.rejected]
            self.arrived.set()


async def reach(endpoint: str) -> None:
    """See whether anything accepts connections at a tcp:// endpoint. Raises UnreachableError."""
    try:
        address = urlsplit(endpoint)
        host, port = address.hostname, address.port
    except ValueError as error:
        raise UnreachableError(f"{endpoint} is no address: {error}") from error
    if address.scheme != "tcp":
        return
    if not host or not port:
        raise UnreachableError(f"{endpoint} is no address: expected tcp://HOST:PORT")
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, writer = await asyncio.open_connection(host, port)
    except TimeoutError as error:
        raise UnreachableError(f"{endpoint}: no connection within {CONNECT_TIMEOUT:g} s") from error
    except OSError as error:
        raise UnreachableError(f"{endpoint}: {error.strerror or error}") from error
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
