"""The publication of recorded streams, at their recorded pace or faster."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from kvevents.frames import MalformedFrameError, end_of_replay_frames, parse_replay_request, replay_frames
from kvrouter.tools.replay.recorded import LiveMessage, Recording, Source


class Pace:
    """A pace: recorded times converted to times to wait for, at `speed` times their rate. `None`: without delay."""

    def __init__(self, started_at: float, speed: float | None) -> None:
        self._recorded_start = started_at
        self._speed = speed
        self._start = time.monotonic()

    async def wait_for(self, recorded_at: float) -> None:
        """Sleep until a recorded moment. Other tasks always get a turn."""
        delay = 0.0
        if self._speed is not None:
            delay = self._start + (recorded_at - self._recorded_start) / self._speed - time.monotonic()
        await asyncio.sleep(max(delay, 0))


_SEND_QUEUE = 100_000  # messages to one subscriber; beyond it ZeroMQ drops, and the gap is replayed
_REPLAY_QUEUE = 1_000  # messages to one replay client; beyond it the replay waits
_REPLAY_RETRY_S = 0.005
_REPLAY_STALL_S = 5.0  # seconds without progress after which a replay is abandoned
_LINGER_MS = 1_000
_BIND_RETRY_S = 0.01
_BIND_TIMEOUT_S = 5.0  # seconds; a port that was just closed may be busy for a moment
SUBSCRIBE_TIMEOUT_S = 10.0


class PublishedSource:
    """The sockets of one source, whose endpoints stay over restarts. `last_seq`: the newest batch of a subscriber."""

    def __init__(self, context: zmq.asyncio.Context, source: Source, host: str, port: int) -> None:
        self.source = source
        self.endpoint = f"tcp://{host}:{port or '*'}"
        self.replay_endpoint = f"tcp://{host}:{port + 1 if port else '*'}"
        self._context = context
        self._life = 0
        self._through = source.lives[0].first_to_come - 1
        self.last_seq = self._through if self._through in source.lives[0].batches else None
        self._subscribed = asyncio.Event()
        self._open()

    async def publish(self, message: LiveMessage) -> None:
        """Send a recorded message. The first one of another life is sent after a restart of the publisher."""
        if message.life != self._life:
            await self._restart(message.life)
        await self._pub.send_multipart(message.frames)
        if message.seq is not None:
            self.last_seq = self._through = message.seq

    async def subscribed(self) -> None:
        """Wait for a subscriber. Raises TimeoutError after SUBSCRIBE_TIMEOUT_S."""
        await asyncio.wait_for(self._subscribed.wait(), SUBSCRIBE_TIMEOUT_S)

    async def close(self) -> None:
        """Close the sockets. Published messages are still sent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._pub.close(_LINGER_MS)
        self._router.close(0)

    def _open(self) -> None:
        self._pub = self._context.socket(zmq.XPUB)  # a PUB that sees its subscribers
        self._router = self._context.socket(zmq.ROUTER)
        self._pub.set_hwm(_SEND_QUEUE)
        self._router.set_hwm(_REPLAY_QUEUE)
        # Without ROUTER_MANDATORY, messages to a client with a full buffer are dropped silently.
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            self.endpoint = _bind(self._pub, self.endpoint)
            self.replay_endpoint = _bind(self._router, self.replay_endpoint)
        except zmq.ZMQError:
            self._pub.close(0)
            self._router.close(0)
            raise
        self._tasks = [asyncio.create_task(self._watch_subscribers()), asyncio.create_task(self._answer_replays())]

    async def _restart(self, life: int) -> None:
        """Restart as an engine does: close the sockets, bind the ports again, and wait for subscribers."""
        returning = self._subscribed.is_set()
        await self.close()
        self._life = life
        self._through = self.source.lives[life].first_to_come - 1
        self._subscribed.clear()
        deadline = time.monotonic() + _BIND_TIMEOUT_S
        while True:
            try:
                self._open()
                break
            except zmq.ZMQError:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_BIND_RETRY_S)
        if returning:
            with suppress(TimeoutError):
                await self.subscribed()

    async def _watch_subscribers(self) -> None:
        while True:
            if (await self._pub.recv())[:1] == b"\x01":
                self._subscribed.set()

    async def _answer_replays(self) -> None:
        while True:
            try:
                client, start = parse_replay_request(await self._router.recv_multipart())
            except MalformedFrameError:
                continue  # engines ignore it too
            with suppress(zmq.ZMQError):  # a client that disconnected, or reads nothing
                await self._replay(client, start, self._through)

    async def _replay(self, client: bytes, start: int, through: int) -> None:
        source = self.source
        for seq, payload in sorted(source.lives[self._life].batches.items()):
            if start <= seq <= through:
                frames = replay_frames(client, source.topic, seq, payload)
                await self._reply(frames if source.replay_has_topic else [*frames[:2], *frames[3:]])
        end = end_of_replay_frames(client)
        await self._reply(end if source.replay_has_topic else [*end[:2], *end[3:]])

    async def _reply(self, frames: list[bytes]) -> None:
        deadline = time.monotonic() + _REPLAY_STALL_S
        while True:
            try:
                await self._router.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_REPLAY_RETRY_S)


class Publication(AbstractAsyncContextManager["Publication"]):
    """All sources of a recording, as a context. Nothing is published before `publish`.

    Source n has port `port + 2n`, and its replays the next one; port 0 binds free ones. Raises OSError.
    """

    def __init__(self, recording: Recording, host: str = "127.0.0.1", port: int = 0) -> None:
        self._recording = recording
        self._host = f"[{host}]" if ":" in host else host
        self._port = port
        self.sources: dict[int, PublishedSource] = {}

    async def publish(self, message: LiveMessage) -> None:
        """Send a recorded message on its source's socket."""
        await self.sources[message.source].publish(message)

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        try:
            for number, source in self._recording.sources.items():
                port = self._port and self._port + 2 * number
                self.sources[number] = PublishedSource(self._context, source, self._host, port)
        except zmq.ZMQError as error:
            await self.__aexit__(None, None, None)
            raise OSError(error.errno, f"cannot bind {self._host}, port {self._port or 'any'}: {error}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for source in self.sources.values():
            await source.close()
        self._context.destroy(0)


def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    socket.bind(endpoint)
    bound = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.decode().rstrip("\0")
