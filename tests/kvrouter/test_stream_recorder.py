"""Tests of `kvrouter record`: contents and end of a recording."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
import zmq
from aiohttp.test_utils import unused_port
from click.testing import Result
from typer.testing import CliRunner

from kvevents import BlockStored, EventBatch, EventSource
from kvevents.frames import parse_live, parse_replay, replay_request
from kvevents.recording import Channel, Record, read_recording
from kvrouter.cli import app
from kvrouter.processes import KvrouterProcess
from kvrouter.tools.record import RecordedStream, parse_stream, record_streams, worker_sources
from kvrouter.tools.replay.publication import load_recording
from worker import ZmqEventPublisher

DEADLINE_S = 60.0
LOOPBACK = "tcp://127.0.0.1:0"


@pytest.fixture
def publishers() -> Iterator[list[ZmqEventPublisher]]:
    made = [ZmqEventPublisher(0, LOOPBACK, LOOPBACK, topic="kv", bind=True) for _ in range(2)]
    yield made
    for publisher in made:
        publisher.shutdown()


def sources(publishers: list[ZmqEventPublisher]) -> list[EventSource]:
    return [EventSource(0, each.endpoint, each.replay_endpoint, "kv") for each in publishers]


def stored(number: int) -> EventBatch:
    return EventBatch(float(number), [BlockStored([number], None, [1, 2], 2)])


def records(path: Path) -> list[Record]:
    return list(read_recording(path, torn_end=True)) if path.exists() else []


def records_of(path: Path, channel: Channel, source: int) -> list[Record]:
    return [record for record in records(path) if record.channel is channel and record.source == source]


def seqs(path: Path, source: int) -> list[int]:
    return [parse_live(record.frames).seq for record in records_of(path, Channel.LIVE, source)]


def newest(publisher: ZmqEventPublisher) -> int:
    """Return the sequence number of the last published batch, from the publisher's replay."""
    assert publisher.replay_endpoint is not None
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        dealer.rcvtimeo = int(DEADLINE_S * 1000)
        dealer.connect(publisher.replay_endpoint)
        dealer.send_multipart(replay_request(0))
        last = -1
        while (frame := parse_replay(dealer.recv_multipart())) is not None:
            last = frame.seq
        return last


def ends_of_replay(path: Path, source: int) -> int:
    return sum(parse_replay(record.frames) is None for record in records_of(path, Channel.REPLAY, source))


async def until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.01)


def test_live_batches_and_replays_are_recorded_by_source(publishers: list[ZmqEventPublisher], tmp_path: Path) -> None:
    path = tmp_path / "two.kvrec"

    async def run() -> list[RecordedStream]:
        for number in range(3):
            publishers[1].publish(stored(number))
        await until(lambda: newest(publishers[1]) == 2, "the publisher sends late")
        recording = asyncio.create_task(record_streams(sources(publishers), path, None))
        await until(lambda: all(ends_of_replay(path, source) for source in (0, 1)), "no replay at the start")
        for source, publisher in enumerate(publishers):
            while not records_of(path, Channel.LIVE, source):  # subscribed once the first one is there
                publisher.publish(stored(3))
                await asyncio.sleep(0.01)
        for number in range(5):
            publishers[0].publish(stored(number))
        await until(lambda: seqs(path, 0)[-1] == newest(publishers[0]), "live batches missing")
        os.kill(os.getpid(), signal.SIGINT)
        return await asyncio.wait_for(recording, DEADLINE_S)

    first, second = asyncio.run(run())
    assert seqs(path, 0) == [*range(seqs(path, 0)[0], newest(publishers[0]) + 1)]
    assert (first.live, first.missing) == (len(seqs(path, 0)), 0)
    assert first.replayed == newest(publishers[0]) + 1
    assert second.replayed == 3 + newest(publishers[1]) + 1
    assert {record.frames[0] for record in records_of(path, Channel.LIVE, 0)} == {b"kv"}
    assert [ends_of_replay(path, source) for source in (0, 1)] == [2, 2]
    times = [record.received_at for record in records(path)]
    assert times == sorted(times)
    assert abs(times[-1] - time.time()) < DEADLINE_S
    late = load_recording(path).sources[1].lives[0]
    assert late.first_live is not None
    assert late.first_live >= 3
    assert sorted(late.batches) == [*range(newest(publishers[1]) + 1)]


def test_recording_ends_after_seconds_and_reports_missing_batches(tmp_path: Path) -> None:
    endpoint = f"tcp://127.0.0.1:{unused_port()}"
    path = tmp_path / "none.kvrec"
    recorded = record("--output", path, "--stream", endpoint, "--seconds", "0.1")
    assert recorded.exit_code == 0
    assert f"recorded 0 live and 0 replayed batches of 1 streams to {path} (0 bytes)" in recorded.output
    assert f"source 0: no messages from {endpoint}" in recorded.output


def test_killed_recorder_leaves_usable_recording(publishers: list[ZmqEventPublisher], tmp_path: Path) -> None:
    path = tmp_path / "killed.kvrec"
    first = publishers[0]
    with recorder("--output", path, "--stream", f"{first.endpoint},{first.replay_endpoint},kv") as process:

        async def run() -> None:
            await until(lambda: ends_of_replay(path, 0) == 1, "not recording")
            while not records_of(path, Channel.LIVE, 0):
                first.publish(stored(0))
                await asyncio.sleep(0.01)

        asyncio.run(asyncio.wait_for(run(), DEADLINE_S))
        process.kill()
        process.wait(DEADLINE_S)
    assert load_recording(path).messages


def test_recording_of_worker_passes_check(tmp_path: Path) -> None:
    """A worker with two ranks is recorded from the middle of its life and then replayed."""
    path = tmp_path / "worker.kvrec"
    simulated = ["simulate", "--dp-size", "2", "--blocks", "64", "--max-model-len", "512", "--prefill-ms", "0.001"]
    with KvrouterProcess([*simulated, "--step-ms", "1"]) as worker:
        url = worker.wait_until_listening()
        assert [source.dp_rank for source in asyncio.run(worker_sources([url]))] == [0, 1]
        chance = random.Random(5)
        systems = [[chance.randrange(100, 2000) for _ in range(100)] for _ in range(3)]
        prompts = [chance.choice(systems) + [chance.randrange(100, 2000) for _ in range(60)] for _ in range(40)]
        ranks = [chance.randrange(2) for _ in prompts]
        asked = zip(prompts[:10], ranks, strict=False)
        earlier = [ask(url, prompt, rank) for prompt, rank in asked]
        with recorder("--output", path, "--worker", url) as process:
            asyncio.run(until_recording(path))
            lines = []
            for prompt, rank in zip(prompts[10:], ranks[10:], strict=True):
                until_quiet(path)
                lines.append(ask(url, prompt, rank))
            until_quiet(path)
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, output
        assert re.search(r"recorded \d+ live and \d+ replayed batches of 2 streams to .*worker.kvrec", output)
    assert any(line["cached_tokens"] for line in lines)
    assert earlier
    path.with_name("worker.requests.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checked = CliRunner().invoke(app, ["replay", str(path), "--check", "--verbose"])
    assert checked.exit_code == 0, checked.output
    assert re.search(r"worker +30/30 +0 ", checked.output)


def test_existing_recording_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "there.kvrec"
    path.write_text("precious")
    refused = record("--output", path, "--stream", "tcp://127.0.0.1:1", "--seconds", "0")
    assert refused.exit_code == 1
    assert "File exists" in refused.output
    assert path.read_text() == "precious"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "either --stream or --worker"),
        (["--stream", "tcp://a:1", "--worker", "http://a"], "either --stream or --worker"),
        (["--stream", "localhost:5557"], "expected ENDPOINT"),
        (["--stream", "tcp://127.0.0.1:1,5558"], "expected ENDPOINT"),
        (["--stream", "tcp://127.0.0.1"], "cannot connect to 'tcp://127.0.0.1'"),
        (["--worker", "gpu-1:8000"], "http"),
        (["--worker", f"http://127.0.0.1:{unused_port()}"], "127.0.0.1"),
    ],
)
def test_invalid_streams_are_rejected(tmp_path: Path, arguments: list[str], message: str) -> None:
    refused = record("--output", tmp_path / "no.kvrec", *arguments)
    assert refused.exit_code == 1
    assert message in refused.output


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("tcp://a:1", EventSource(3, "tcp://a:1")),
        ("tcp://a:1,tcp://a:2", EventSource(3, "tcp://a:1", "tcp://a:2")),
        ("tcp://a:1,tcp://a:2,kv,x", EventSource(3, "tcp://a:1", "tcp://a:2", "kv,x")),
        ("tcp://a:1,,kv", EventSource(3, "tcp://a:1", None, "kv")),
    ],
)
def test_stream_option_is_endpoint_replay_and_topic(text: str, source: EventSource) -> None:
    assert parse_stream(text, 3) == source


def record(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["record", *map(str, arguments)], env={"COLUMNS": "200"})


@contextmanager
def recorder(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "kvrouter", "record", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def until_recording(path: Path) -> None:
    await until(lambda: all(ends_of_replay(path, source) for source in (0, 1)), "not recording")


def until_quiet(path: Path) -> None:
    """Wait until the events of the last request are in: nothing new for a while."""
    size, since = -1, time.monotonic()
    deadline = since + DEADLINE_S
    while time.monotonic() - since < 0.05 and time.monotonic() < deadline:
        if path.stat().st_size != size:
            size, since = path.stat().st_size, time.monotonic()
        time.sleep(0.005)


def ask(url: str, prompt: list[int], rank: int) -> dict[str, Any]:
    """Send a prompt to a rank; the line that belongs to it."""
    body = {"model": "simulated", "prompt": prompt, "max_tokens": 2}
    headers = {"X-data-parallel-rank": str(rank)}
    started = time.time()
    request = Request(
        f"{url}/v1/completions", json.dumps(body).encode(), headers | {"Content-Type": "application/json"}
    )
    with urlopen(request, timeout=DEADLINE_S) as answer:
        usage = json.load(answer)["usage"]
    return {
        "kind": "chat",
        "t_start": started,
        "model": "simulated",
        "prompt_token_ids": prompt,
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "headers": headers,
    }
