"""Load shared between replicas over Redis or Valkey: one pub/sub channel, nothing stored.

What a replica sent ends with its silence, so nothing is left behind in Redis by one that died.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import structlog

log = structlog.get_logger()

_CONNECT_SECONDS = 2.0
_LONGEST_BACKOFF = 5.0
# Messages that wait for a slow Redis; the oldest are dropped first.
_MAX_WAITING = 256


class RedisChannel:
    """Reconnects for ever, with a backoff. `silence`: own messages come back, so that so long without one is an error.

    `url` as redis-py takes it: redis://user:password@host:6379/0, rediss:// for TLS (?ssl_ca_certs=file), unix://.
    """

    def __init__(self, url: str, prefix: str, interval: float, silence: float) -> None:
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
        """Send to all others soon. What waits while there is no connection is dropped."""
        self._waiting.append(message)
        self._any_waiting.set()
        self._all_sent.clear()

    async def flush(self) -> None:
        """Wait until what was sent has left."""
        await self._all_sent.wait()

    async def run(self, receive: Callable[[bytes], None], connected: Callable[[], None]) -> None:
        """Bring messages until cancelled."""
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
    """The first of some errors, in words."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
