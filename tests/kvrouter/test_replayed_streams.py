"""Tests of `kvrouter replay`: messages, replays and pace of a published recording."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from kvevents import AllBlocksCleared, EventBatch, encode_batch
from kvevents.frames import END_OF_REPLAY, encode_seq, live_frames, parse_live, replay_request
from kvevents.recording import Channel, Record, RecordingWriter, read_recording
from kvrouter.tools.replay.publication import (
    Pace,
    Publication,
    PublishedSource,
    Recording,
    UnusableRecordingError,
    load_recording,
)

DATA = Path(__file__).parents[1] / "data"
DEADLINE_S = 60.0


def recording(name: str) -> Path:
    (path,) = DATA.rglob(f"{name}.kvrec")
    return path


def live(path: Path, source: int) -> list[list[bytes]]:
    return [r.frames for r in read_recording(path) if r.channel is Channel.LIVE and r.source == source]


def written(path: Path, *records: Record) -> Path:
    with RecordingWriter(path) as writer:
        for record in records:
            writer.write(record)
    return path


def batch(seq: int, at: float = 0.0) -> Record:
    return Record(at, Channel.LIVE, 0, live_frames(b"t", seq, encode_batch(EventBatch(at, [AllBlocksCleared()]))))


def replayed(seq: int, at: float = 0.0) -> Record:
    return Record(at, Channel.REPLAY, 0, [b"", *batch(seq, at).frames])


class Client:
    """A subscriber of one source, with a deadline for whatever it waits for."""

    def __init__(self, context: zmq.asyncio.Context, source: PublishedSource) -> None:
        self.source = source
        self.sub = context.socket(zmq.SUB)
        self.sub.subscribe(b"")
        self.sub.connect(source.endpoint)
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.connect(source.replay_endpoint)

    async def received(self, count: int) -> list[list[bytes]]:
        return [await asyncio.wait_for(self.sub.recv_multipart(), DEADLINE_S) for _ in range(count)]

    async def replay(self, start: int) -> list[list[bytes]]:
        """The messages of one replay, without its end marker."""
        await self.dealer.send_multipart(replay_request(start))
        messages: list[list[bytes]] = []
        while True:
            message = await asyncio.wait_for(self.dealer.recv_multipart(), DEADLINE_S)
            if message[-2:] == [END_OF_REPLAY, b""]:
                return messages
            messages.append(message)


@asynccontextmanager
async def published(path: Path) -> AsyncIterator[tuple[Recording, Publication, list[Client]]]:
    loaded = load_recording(path)
    async with Publication(loaded) as publication:
        context = zmq.asyncio.Context()
        try:
            clients = [Client(context, source) for source in publication.sources.values()]
            for source in publication.sources.values():
                await source.subscribed()
            yield loaded, publication, clients
        finally:
            context.destroy(0)


@pytest.mark.parametrize("name", ["e_dp2", "s3_sglang_salt_page32"])
def test_subscribers_receive_every_message_unchanged(name: str) -> None:
    async def run() -> None:
        async with published(recording(name)) as (loaded, publication, clients):
            for message in loaded.messages:
                await publication.publish(message)
            for number, client in enumerate(clients):
                expected = live(recording(name), number)
                assert await client.received(len(expected)) == expected

    asyncio.run(run())


def test_replay_returns_batches_published_so_far() -> None:
    async def run() -> None:
        async with published(recording("c_pressure_evictions")) as (loaded, publication, (client,)):
            assert await client.replay(0) == []
            for message in loaded.messages[:50]:
                await publication.publish(message)
            expected = [[b"", *message.frames] for message in loaded.messages[:50]]
            assert await client.replay(0) == expected
            assert await client.replay(47) == expected[47:]
            assert await client.replay(50) == []

    asyncio.run(run())


def test_replay_has_frames_of_recorded_engine() -> None:
    async def run() -> None:
        name = "c_pressure_evictions.vllm-0.16.0"
        async with published(recording(name)) as (loaded, publication, (client,)):
            await publication.publish(loaded.messages[0])
            _, seq, payload = loaded.messages[0].frames
            assert await client.replay(0) == [[b"", seq, payload]]

    asyncio.run(run())


def test_malformed_or_disconnected_client_does_not_affect_others() -> None:
    async def run() -> None:
        async with published(recording("c_pressure_evictions")) as (loaded, publication, (client,)):
            await publication.publish(loaded.messages[0])
            with zmq.asyncio.Context() as context:
                other = Client(context, publication.sources[0])
                await other.dealer.send_multipart([b"", b"short"])
                await other.dealer.send_multipart([encode_seq(0)])
                await other.dealer.send_multipart(replay_request(0))
                context.destroy(100)
            assert len(await client.replay(0)) == 1

    asyncio.run(run())


def test_restarted_engine_keeps_endpoints_and_loses_batches() -> None:
    async def run() -> None:
        path = recording("i_restart_seq_reset_and_replay_truncation")
        async with published(path) as (loaded, publication, (client,)):
            receiving = asyncio.create_task(client.received(len(loaded.messages)))  # a SUB must be read to reconnect
            for message in loaded.messages:
                await publication.publish(message)
            seqs = [parse_live(frames).seq for frames in await receiving]
            assert seqs == [*range(45), *range(19)]
            assert [int.from_bytes(message[-2], "big") for message in await client.replay(0)] == [*range(19)]

    asyncio.run(run())


def test_batches_before_recording_can_be_replayed_from_start(tmp_path: Path) -> None:
    path = written(tmp_path / "late.kvrec", batch(3, 1.0), *map(replayed, range(4)), batch(4, 2.0), replayed(9, 3.0))

    async def run() -> None:
        async with published(path) as (loaded, publication, (client,)):
            assert [message[2] for message in await client.replay(0)] == [encode_seq(seq) for seq in range(3)]
            await publication.publish(loaded.messages[0])
            assert len(await client.replay(0)) == 4

    asyncio.run(run())


def test_batches_known_from_replay_can_be_replayed(tmp_path: Path) -> None:
    async def run() -> None:
        async with published(written(tmp_path / "idle.kvrec", *map(replayed, range(3)))) as (loaded, _, (client,)):
            assert loaded.messages == []
            assert len(await client.replay(0)) == 3

    asyncio.run(run())


def test_pace_follows_recorded_times_and_speed() -> None:
    path = recording("s3_sglang_salt_page32")

    async def arrivals(speed: float | None) -> list[float]:
        async with published(path) as (loaded, publication, (client,)):
            pace = Pace(loaded.started_at, speed)
            times: list[float] = []
            for message in loaded.messages:
                await pace.wait_for(message.received_at)
                await publication.publish(message)
                await client.received(1)
                times.append(time.monotonic())
            return [at - times[0] for at in times]

    recorded = [message.received_at for message in load_recording(path).messages]
    offsets = [at - recorded[0] for at in recorded]
    for speed in (1.0, 10.0):
        for arrived, offset in zip(asyncio.run(arrivals(speed)), offsets, strict=True):
            assert arrived > offset / speed - 0.05  # never early, but for how late the first one was
    assert asyncio.run(arrivals(None))[-1] < offsets[-1]


def test_ranks_and_workers_are_distinguished() -> None:
    two_workers = load_recording(recording("a_shared_system_prompt_2workers")).sources
    two_ranks = load_recording(recording("e_dp2")).sources
    assert [(s.worker, s.dp_rank, s.block_size, s.engine) for s in two_workers.values()] == [
        (0, 0, 32, "vLLM"),
        (1, 0, 32, "vLLM"),
    ]
    assert [(s.worker, s.dp_rank) for s in two_ranks.values()] == [(0, 0), (0, 1)]
    (sglang,) = load_recording(recording("s1_sglang_radix_page16_evict")).sources.values()
    assert (sglang.engine, sglang.block_size, sglang.topic) == ("SGLang", 16, b"")
    assert load_recording(recording("g_lora_salt_block64")).adapters == {"lora-a", "lora-b"}


def test_truncated_recording_is_used(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.kvrec", batch(0), batch(1)).read_bytes()
    (tmp_path / "cut.kvrec").write_bytes(whole[:-1])
    assert [message.seq for message in load_recording(tmp_path / "cut.kvrec").messages] == [0]


def test_malformed_messages_are_published_unchanged(tmp_path: Path) -> None:
    odd = [Record(0.0, Channel.LIVE, 0, frames) for frames in ([b"t", b"1", b""], live_frames(b"t", 7, b"\xff"))]
    path = written(tmp_path / "odd.kvrec", *odd, Record(0.0, Channel.REPLAY, 0, [b"", b"what"]))

    async def run() -> None:
        async with published(path) as (loaded, publication, (client,)):
            for message in loaded.messages:
                await publication.publish(message)
                assert message.batch() is None
            assert await client.received(2) == [record.frames for record in odd]

    asyncio.run(run())


@pytest.mark.parametrize("content", [b"", b"this is no recording"])
def test_file_without_stream_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "none.kvrec"
    path.write_bytes(content)
    with pytest.raises(UnusableRecordingError, match=str(path)):
        load_recording(path)


def test_command_publishes_until_signal() -> None:
    command = [sys.executable, "-m", "kvrouter", "replay", "--fast", str(recording("e_dp2"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith("published 64 batches"):
                break
        endpoints = re.findall(r"tcp://\S+", "".join(lines))
        assert len(set(endpoints)) == 4
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.rcvtimeo = int(DEADLINE_S * 1000)
            dealer.connect(endpoints[1])
            dealer.send_multipart(replay_request(0))
            assert dealer.recv_multipart()[2] == encode_seq(0)
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 0
