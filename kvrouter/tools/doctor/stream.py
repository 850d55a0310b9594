"""One event stream as a subscriber sees it: whether it is reachable, and all messages under any topic."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event, Thread
from urllib.parse import urlsplit

import zmq

from indexer.sockets import Connected, ConnectionEvent, HandshakeFailed, Reached, monitor_of, read_monitor
from kvevents import BlockStored, EventBatch, EventSource, MalformedBatchError, decode_batch
from kvevents.curve import KeyPair, be_client, temporary_key_pair
from kvevents.frames import MalformedFrameError, parse_live, parse_replay, replay_request

CONNECT_TIMEOUT = 3.0  # seconds
REPLAY_TIMEOUT = 3.0
_QUEUE = 100_000  # messages
_TURN_MS = 50  # milliseconds between checks whether to end


class UnreachableError(Exception):
    """An unreachable address. The message describes the attempt."""


class NoPublisherError(Exception):
    """An address at which a service other than a publisher answers."""


@dataclass(slots=True)
class Received:
    """The messages of a stream: batches by number and time of arrival (unix seconds), topics, and unreadable ones."""

    batches: list[tuple[int, float, EventBatch]] = field(default_factory=list)
    topics: set[str] = field(default_factory=set)
    unreadable: list[str] = field(default_factory=list)

    def stored(self) -> list[BlockStored]:
        """Return every block that was stored, in order."""
        return [event for _, _, batch in self.batches for event in batch.events if isinstance(event, BlockStored)]


class WatchedStream:
    """A subscriber of a DP rank's stream in its own thread, from `connect` to `close`."""

    def __init__(self, source: EventSource, keys: KeyPair | None) -> None:
        self.source = source
        self.received = Received()
        self.arrived = asyncio.Event()  # set at every message
        self._loop = asyncio.get_running_loop()
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._closing = Event()
        self._thread: Thread | None = None

    async def connect(self) -> None:
        """Connect to the publisher and begin to listen. Raises UnreachableError and NoPublisherError."""
        await reach(self.source.endpoint)
        socket = await asyncio.to_thread(self._subscribe)
        self._thread = Thread(target=self._follow, args=(socket,), name="doctor-stream", daemon=True)
        self._thread.start()

    async def replayed(self) -> int:
        """Return the number of batches that the replay endpoint has. Raises UnreachableError and NoPublisherError."""
        assert self.source.replay_endpoint is not None
        await reach(self.source.replay_endpoint)
        return await asyncio.to_thread(self._ask_replay, self.source.replay_endpoint)

    async def close(self) -> None:
        """Stop listening."""
        self._closing.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._context.destroy(0)

    def _subscribe(self) -> zmq.Socket[bytes]:
        endpoint = self.source.endpoint
        socket = self._open(zmq.SUB)
        socket.subscribe(b"")
        monitor = monitor_of(socket)
        try:
            _connect(socket, endpoint)
            event: ConnectionEvent = Reached()
            while isinstance(event, Reached):
                if not monitor.poll(int(CONNECT_TIMEOUT * 1000)):
                    what = "accepts connections, but is silent: it hangs, or is not a publisher"
                    raise NoPublisherError(f"{endpoint} {what}")
                event = read_monitor(monitor)
            if not isinstance(event, Connected):
                reason = event.reason if isinstance(event, HandshakeFailed) else "the publisher closes the connection"
                raise NoPublisherError(f"{endpoint} is not a publisher: {reason}")
        except BaseException:
            socket.disable_monitor()
            socket.close(0)
            raise
        finally:
            monitor.close(0)
        socket.disable_monitor()
        return socket

    def _ask_replay(self, endpoint: str) -> int:
        with self._open(zmq.DEALER) as dealer:
            _connect(dealer, endpoint)
            try:
                dealer.send_multipart(replay_request(0), zmq.NOBLOCK)
            except zmq.Again as error:  # ZeroMQ already knows that it must not connect again
                raise NoPublisherError(f"{endpoint} does not answer as a replay endpoint") from error
            count = 0
            try:
                while dealer.poll(int(REPLAY_TIMEOUT * 1000)):
                    if parse_replay(dealer.recv_multipart()) is None:
                        return count
                    count += 1
            except MalformedFrameError as error:
                raise NoPublisherError(f"{endpoint} does not answer a replay request as it should: {error}") from error
        raise NoPublisherError(f"{endpoint} is reachable, but sends no end of a replay within {REPLAY_TIMEOUT:g} s")

    def _open(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.set_hwm(_QUEUE)
        if self.source.curve_server_key is not None:
            be_client(socket, self.source.curve_server_key, self._keys or temporary_key_pair())
        return socket

    def _follow(self, socket: zmq.Socket[bytes]) -> None:
        with socket:
            while not self._closing.is_set():
                if socket.poll(_TURN_MS):
                    self._read(socket.recv_multipart())
                    self._notify(self.arrived.set)

    def _read(self, frames: list[bytes]) -> None:
        self.received.topics.add(frames[0].decode(errors="replace"))
        try:
            frame = parse_live(frames)
            batch = decode_batch(frame.payload)
        except (MalformedFrameError, MalformedBatchError) as error:
            self.received.unreadable.append(str(error))
            return
        self.received.batches.append((frame.seq, time.time(), batch))
        self.received.unreadable += [rejected.reason for rejected in batch.rejected]

    def _notify(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(call)


def _connect(socket: zmq.Socket[bytes], endpoint: str) -> None:
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise UnreachableError(f"{endpoint} is not an address: {error}") from error


async def reach(endpoint: str) -> None:
    """Check that a tcp:// endpoint accepts connections. Raises UnreachableError."""
    try:
        address = urlsplit(endpoint)
        host, port = address.hostname, address.port
    except ValueError as error:
        raise UnreachableError(f"{endpoint} is not an address: {error}") from error
    if address.scheme != "tcp":
        return
    if not host or not port:
        raise UnreachableError(f"{endpoint} is not an address: expected tcp://HOST:PORT")
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
