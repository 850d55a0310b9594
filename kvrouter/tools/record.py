"""`kvrouter record`: a recording of live event streams.

Each stream is followed from the start on. Its publisher's buffer is requested twice: at the start for earlier batches,
and at the end for lost ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import zmq
import zmq.asyncio

from kvevents import EventSource
from kvevents.frames import MalformedFrameError, parse_live, parse_replay, replay_request
from kvevents.recording import Channel, Record, RecordingWriter
from kvrouter.processes import stop_signal
from router.fleet.discovery import describe_worker
from router.http.client import refuse_redirects
from router.http.worker_url import canonical_url
from router.settings import WorkerSettings

CONNECT_TIMEOUT_S = 2.0  # seconds; a publisher may also start later
REPLAY_SILENCE_S = 1.0  # seconds without a message after which a replay is over, even without its end marker
REPLAY_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 10.0  # seconds for a worker's own answers
_RECEIVE_QUEUE = 100_000  # messages


@dataclass(slots=True)
class RecordedStream:
    """The counts of one recorded stream. `missing` live batches were published but did not arrive."""

    source: EventSource
    live: int = 0
    replayed: int = 0
    missing: int = 0
    last_seq: int | None = None

    def as_json(self) -> dict[str, int | str]:
        """Return the endpoint and the counts, for scripts."""
        counts = {"live": self.live, "replayed": self.replayed, "missing": self.missing}
        return {"endpoint": self.source.endpoint, "dp_rank": self.source.dp_rank, **counts}


def parse_stream(text: str, number: int) -> EventSource:
    """Parse `ENDPOINT[,REPLAY_ENDPOINT[,TOPIC]]`. Raises ValueError."""
    endpoint, *others = text.split(",", 2)
    replay_endpoint, topic = [*others, "", ""][:2]
    if "://" not in endpoint or (replay_endpoint and "://" not in replay_endpoint):
        raise ValueError(
            f"stream {text!r}: expected ENDPOINT[,REPLAY_ENDPOINT[,TOPIC]], for example tcp://127.0.0.1:5557"
        )
    return EventSource(number, endpoint, replay_endpoint or None, topic)


async def worker_sources(urls: Sequence[str]) -> list[EventSource]:
    """Return the streams of all ranks of these workers, by worker and rank. Raises DiscoveryError and ValueError."""
    timeout = aiohttp.ClientTimeout(total=ASK_TIMEOUT_S)
    sources: list[EventSource] = []
    async with aiohttp.ClientSession(middlewares=(refuse_redirects,), timeout=timeout) as session:
        for url in urls:
            described = await describe_worker(session, WorkerSettings.model_validate({"url": canonical_url(url)}))
            if not described.streams:
                raise ValueError(f"{url} reports no event streams: set them with --stream")
            sources += sorted(described.streams, key=lambda source: source.dp_rank)
    return sources


async def record_streams(sources: Sequence[EventSource], output: Path, seconds: float | None) -> list[RecordedStream]:
    """Record until SIGINT, SIGTERM, or the end of `seconds`. Raises OSError (file) and ValueError (endpoint)."""
    context = zmq.asyncio.Context()
    try:
        with stop_signal() as stopped, RecordingWriter(output) as writer:
            recorders = [_Recorder(context, writer, number, source) for number, source in enumerate(sources)]
            async with asyncio.TaskGroup() as tasks:
                following = [tasks.create_task(recorder.follow()) for recorder in recorders]
                replays = [tasks.create_task(recorder.replay()) for recorder in recorders]
                with suppress(TimeoutError):
                    await asyncio.wait_for(stopped.wait(), seconds)
                for replay in replays:
                    replay.cancel()
                await asyncio.gather(*(recorder.replay() for recorder in recorders))
                for follow in following:
                    follow.cancel()
            return [recorder.stream for recorder in recorders]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    finally:
        context.destroy(0)


def summary_lines(streams: Sequence[RecordedStream], output: Path) -> list[str]:
    """Return the recorded counts, and a line for each stream with missing batches."""
    live, replayed = sum(stream.live for stream in streams), sum(stream.replayed for stream in streams)
    counts = f"{live} live and {replayed} replayed batches of {len(streams)} streams"
    lines = [f"recorded {counts} to {output} ({output.stat().st_size} bytes)"]
    for number, stream in enumerate(streams):
        if not stream.live and not stream.replayed:
            lines.append(f"source {number}: no messages from {stream.source.endpoint}")
        elif stream.missing:
            lines.append(f"source {number}: {stream.missing} live batches of {stream.source.endpoint} did not arrive")
    return lines


class _Recorder:
    """The sockets of one stream and its counts."""

    def __init__(self, context: zmq.asyncio.Context, writer: RecordingWriter, number: int, source: EventSource) -> None:
        self.stream = RecordedStream(source)
        self._context = context
        self._writer = writer
        self._number = number
        self._live = context.socket(zmq.SUB)
        self._live.set_hwm(_RECEIVE_QUEUE)
        self._live.subscribe(source.topic)
        self._monitor = self._live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        _connect(self._live, source.endpoint)

    async def follow(self) -> None:
        """Record live batches until cancelled."""
        while True:
            frames = await self._live.recv_multipart()
            self._write(Channel.LIVE, frames)
            self.stream.live += 1
            with suppress(MalformedFrameError):
                seq, last = parse_live(frames).seq, self.stream.last_seq
                if last is not None and seq > last + 1:
                    self.stream.missing += seq - last - 1
                self.stream.last_seq = seq

    async def replay(self) -> None:
        """Record one replay from 0 on, once the live stream is connected. Without a replay endpoint, return."""
        if self.stream.source.replay_endpoint is None:
            return
        await self._monitor.poll(int(CONNECT_TIMEOUT_S * 1000))
        dealer = self._context.socket(zmq.DEALER)
        try:
            dealer.set_hwm(_RECEIVE_QUEUE)
            _connect(dealer, self.stream.source.replay_endpoint)
            with suppress(zmq.Again):  # ZeroMQ already knows that the endpoint cannot replay
                await dealer.send_multipart(replay_request(0), zmq.NOBLOCK)
            deadline = time.monotonic() + REPLAY_TIMEOUT_S
            while time.monotonic() < deadline and await dealer.poll(int(REPLAY_SILENCE_S * 1000)):
                frames = await dealer.recv_multipart()
                self._write(Channel.REPLAY, frames)
                with suppress(MalformedFrameError):
                    if parse_replay(frames) is None:
                        return
                self.stream.replayed += 1
        finally:
            dealer.close(0)

    def _write(self, channel: Channel, frames: list[bytes]) -> None:
        self._writer.write(Record(time.time(), channel, self._number, frames))


def _connect(socket: zmq.asyncio.Socket, endpoint: str) -> None:
    try:
        socket.setsockopt(zmq.IPV6, "[" in endpoint)
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ValueError(f"cannot connect to {endpoint!r} ({error}); expected e.g. tcp://127.0.0.1:5557") from error
