"""The channels over which load is shared: between the processes of one machine, and between replicas."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog

from router.load.peer_load import EXPIRY_SECONDS

log = structlog.get_logger()

# Seconds for which changes are gathered: a datagram costs about 10 µs on each side.
INTERVAL = 0.002
_MAX_BYTES = 256 * 1024
# Datagrams that are read in one step, so that requests are served in between.
_AT_ONCE = 64

_CONNECT_SECONDS = 2.0
_LONGEST_BACKOFF = 5.0
# Messages that wait for a slow Redis; the oldest are dropped first.
_MAX_WAITING = 256


class RedisChannel:
    """The channel between replicas: one pub/sub channel of Redis or Valkey, in which nothing is stored.

    It reconnects without a limit, with a backoff. Redis sends a replica its own messages too.

    - `url`: redis://user:password@host:6379/0, rediss:// for TLS (?ssl_ca_certs=file), or unix://.
    - `silence`: the seconds without a message after which the connection counts as broken.
    """

    def __init__(self, url: str, prefix: str, interval: float = 0.005, silence: float = EXPIRY_SECONDS) -> None:
        split = urlsplit(url)
        self.name = f"{split.scheme}://{split.hostname or ''}{f':{split.port}' if split.port else ''}{split.path}"
        self.interval = interval
        self.problem: str | None = "not connected yet"
        self._url = url
        self._channel = f"{prefix}:load"
        self._silence = silence
        self._waiting: deque[bytes] = deque(maxlen=_MAX_WAITING)
        self._any_waiting = asyncio.Event()
        self._all_sent = asyncio.Event()

    def send(self, message: bytes) -> None:
        """Send a message to all others soon. Messages that wait when the connection is made are dropped."""
        self._waiting.append(message)
        self._any_waiting.set()
        self._all_sent.clear()

    async def flush(self) -> None:
        """Wait until all messages have left."""
        await self._all_sent.wait()

    async def run(self, receive: Callable[[bytes], None], connected: Callable[[], None]) -> None:
        """Receive messages until cancelled."""
        from redis.exceptions import RedisError

        backoff = 0.1
        while True:
            try:
                async with asyncio.TaskGroup() as tasks, aclosing(self._client()) as client:
                    subscription = client.pubsub()
                    await subscription.subscribe(self._channel)
                    await subscription.get_message(timeout=_CONNECT_SECONDS)
                    self._waiting.clear()
                    if self.problem is not None:
                        log.info("load is shared", channel=self.name)
                    self.problem, backoff = None, 0.1
                    connected()
                    writing = tasks.create_task(self._write(client))
                    try:
                        await self._read(subscription, receive)
                    finally:
                        writing.cancel()
                        await subscription.aclose()
            except* (RedisError, OSError, TimeoutError) as errors:
                problem = _first(errors)
                if self.problem != problem:
                    log.warning("load is not shared", channel=self.name, reason=problem)
                self.problem = problem
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, _LONGEST_BACKOFF)

    def _client(self) -> Any:
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        return Redis.from_url(
            self._url,
            socket_connect_timeout=_CONNECT_SECONDS,
            socket_timeout=self._silence,
            retry=Retry(NoBackoff(), 0),
        )

    async def _read(self, subscription: Any, receive: Callable[[bytes], None]) -> None:
        while True:
            message = await subscription.get_message(ignore_subscribe_messages=True, timeout=self._silence)
            if message is None:
                raise TimeoutError(f"silent for {self._silence:g} s")
            receive(message["data"])

    async def _write(self, client: Any) -> None:
        while True:
            await self._any_waiting.wait()
            self._any_waiting.clear()
            async with client.pipeline(transaction=False) as pipeline:
                while self._waiting:
                    pipeline.publish(self._channel, self._waiting.popleft())
                await pipeline.execute()
            if not self._waiting:
                self._all_sent.set()


def _first(errors: BaseExceptionGroup[BaseException]) -> str:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


class DatagramChannel:
    """The channel between processes, numbered from 0: datagrams over the Unix sockets of a folder.

    The kernel keeps each datagram whole and in order. A process that does not read for a while loses some.
    """

    def __init__(self, folder: Path, number: int, processes: int) -> None:
        self.name = "unix datagrams"
        self.interval = INTERVAL
        self.problem: str | None = "not bound yet"
        self._path = _path(folder, number)
        self._others = [str(_path(folder, other)) for other in range(processes) if other != number]
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    def send(self, message: bytes) -> None:
        """Send a message to all other processes at once."""
        for other in self._others:
            with suppress(OSError):  # the other process has ended, or does not read
                self._socket.sendto(message, other)

    async def flush(self) -> None:
        """Return at once, because no message waits."""

    async def run(self, receive: Callable[[bytes], None], connected: Callable[[], None]) -> None:
        """Receive messages until cancelled. Raises OSError if the socket cannot be bound."""
        loop = asyncio.get_running_loop()

        def read() -> None:
            for _ in range(_AT_ONCE):
                try:
                    data = self._socket.recv(_MAX_BYTES)
                except OSError:
                    return
                receive(data)

        with self._socket:
            self._path.unlink(missing_ok=True)
            self._socket.bind(str(self._path))
            loop.add_reader(self._socket, read)
            self.problem = None
            connected()
            try:
                await asyncio.Event().wait()
            finally:
                loop.remove_reader(self._socket)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number}.load"
