"""A recording as streams, and their publication at the recorded pace or faster."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq
import zmq.asyncio

from kvevents import BlockStored, EventBatch, MalformedBatchError, decode_batch
from kvevents.events import identity_of
from kvevents.frames import (
    MalformedFrameError,
    end_of_replay_frames,
    parse_live,
    parse_replay,
    parse_replay_request,
    replay_frames,
)
from kvevents.recording import Channel, Record, TornRecordingError, read_recording

_SEND_QUEUE = 100_000  # messages to one subscriber; beyond it ZeroMQ drops, and the gap is replayed
_REPLAY_QUEUE = 1_000  # messages to one replay client; beyond it the replay waits
_REPLAY_RETRY_S = 0.005
_REPLAY_STALL_S = 5.0  # seconds without progress after which a replay is abandoned
_LINGER_MS = 1_000
_BIND_RETRY_S = 0.01
_BIND_TIMEOUT_S = 5.0  # seconds; a port that was just closed may be busy for a moment
SUBSCRIBE_TIMEOUT_S = 10.0


class UnusableRecordingError(ValueError):
    """A file without streams to publish."""


@dataclass(slots=True)
class Life:
    """One publisher from its start to its end: its known batches by sequence number."""

    batches: dict[int, bytes] = field(default_factory=dict)
    first_live: int | None = None
    last_live: int | None = None

    @property
    def first_to_come(self) -> int:
        """The sequence number of the first live batch. Lower ones were published before the recording began."""
        return max(self.batches, default=-1) + 1 if self.first_live is None else self.first_live


@dataclass(frozen=True, slots=True)
class LiveMessage:
    """A recorded PUB message. `seq` is `None` for one that is not a frame of a stream."""

    received_at: float
    source: int
    life: int
    seq: int | None
    frames: list[bytes]

    def batch(self) -> EventBatch | None:
        """Return the message's events; `None` if they are unreadable."""
        return None if self.seq is None else _decoded(self.frames[-1])


@dataclass(slots=True)
class Source:
    """One recorded stream. `worker` counts the recording's workers from 0; `block_size` is in tokens."""

    number: int
    worker: int
    dp_rank: int
    engine: str
    topic: bytes
    replay_has_topic: bool
    block_size: int | None
    adapters: frozenset[str]
    lives: list[Life]

    def batches_before(self) -> list[EventBatch]:
        """Return the batches before the recording, as far as a replay has them."""
        first = self.lives[0]
        return _decoded_all(first.batches[seq] for seq in sorted(first.batches) if seq < first.first_to_come)


@dataclass(frozen=True, slots=True)
class Recording:
    """The sources by number, and their live messages in the order of their arrival."""

    name: str
    sources: dict[int, Source]
    messages: list[LiveMessage]

    @property
    def started_at(self) -> float:
        """The arrival of the first live message (unix seconds); infinity without one."""
        return self.messages[0].received_at if self.messages else math.inf

    @property
    def adapters(self) -> frozenset[str]:
        """The adapters that events name."""
        return frozenset().union(*(source.adapters for source in self.sources.values()))


def load_recording(path: Path) -> Recording:
    """Load a recording, also one that was cut off. Raises UnusableRecordingError and OSError."""
    try:
        records = list(read_recording(path, torn_end=True))
    except TornRecordingError as error:
        raise UnusableRecordingError(str(error)) from error
    messages: list[LiveMessage] = []
    lives: dict[int, list[Life]] = {}
    for record in records:
        of_source = lives.setdefault(record.source, [Life()])
        if record.channel is Channel.LIVE:
            messages.append(_live_message(record, of_source))
        else:
            _add_replayed(record, of_source[-1])
    if not any(life.batches for of_source in lives.values() for life in of_source) and not messages:
        raise UnusableRecordingError(f"{path}: the file has no batches")
    sources: dict[int, Source] = {}
    worker, last_rank = -1, 0
    for number in sorted(lives):
        batches = _decoded_all(payload for life in lives[number] for payload in life.batches.values())
        rank = next((batch.dp_rank for batch in batches if batch.dp_rank is not None), 0)
        if worker < 0 or rank <= last_rank:  # ranks of a worker follow each other
            worker += 1
        last_rank = rank
        sources[number] = _source(number, worker, rank, records, batches, lives[number])
    return Recording(path.stem, sources, messages)


def _live_message(record: Record, lives: list[Life]) -> LiveMessage:
    try:
        frame = parse_live(record.frames)
    except MalformedFrameError:
        return LiveMessage(record.received_at, record.source, len(lives) - 1, None, record.frames)
    last = lives[-1].last_live
    if last is not None and frame.seq <= last:
        lives.append(Life())
    life = lives[-1]
    life.batches[frame.seq] = frame.payload
    life.first_live = frame.seq if life.first_live is None else life.first_live
    life.last_live = frame.seq
    return LiveMessage(record.received_at, record.source, len(lives) - 1, frame.seq, record.frames)


def _add_replayed(record: Record, life: Life) -> None:
    try:
        frame = parse_replay(record.frames)
    except MalformedFrameError:
        return
    if frame is not None:
        life.batches.setdefault(frame.seq, frame.payload)


def _decoded_all(payloads: Iterable[bytes]) -> list[EventBatch]:
    return [batch for payload in payloads if (batch := _decoded(payload)) is not None]


def _decoded(payload: bytes) -> EventBatch | None:
    try:
        return decode_batch(payload)
    except MalformedBatchError:
        return None


def _source(
    number: int, worker: int, dp_rank: int, records: Sequence[Record], batches: Sequence[EventBatch], lives: list[Life]
) -> Source:
    live = next((r.frames for r in records if r.source == number and r.channel is Channel.LIVE), [b""])
    replayed = next((r.frames for r in records if r.source == number and r.channel is Channel.REPLAY), None)
    stored = [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]
    signed = any(isinstance(name, int) and name < 0 for event in stored for name in event.block_hashes)
    return Source(
        number,
        worker,
        dp_rank,
        "SGLang" if signed else "vLLM",  # vLLM's hashes are unsigned
        live[0],
        replayed is None or len(replayed) == 4,
        next((event.block_size for event in stored if event.token_ids), None),
        _adapters(stored),
        lives,
    )


def _adapters(stored: Sequence[BlockStored]) -> frozenset[str]:
    names: set[str] = set()
    for event in stored:
        try:
            name = identity_of(event, names).adapter
        except ValueError:
            continue
        if name is not None:
            names.add(name)
    return frozenset(names)


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
