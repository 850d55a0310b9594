"""Faults over real sockets: the index recovers or reports losses, and another stream is not affected.

Each test prints the time from the end of the fault until the index agrees with the engine on every prompt. It also
prints the longest pause between two answers about the healthy stream (`make bench-faults`).
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from engine_publisher import Publisher
from random_engine import Engine
from structlog.testing import capture_logs
from waiting import eventually

from indexer import Indexer, MatchQuery, Registration, Target
from indexer.streams.reader import StreamStatus
from indexer.streams.sequence import StreamState
from kvevents import BlockStored, Event, EventBatch, EventSource, encode_batch
from kvevents.frames import live_frames

FAULTY, HEALTHY = Target("faulty", 0, "m"), Target("healthy", 0, "n")
HELPERS = Path(__file__).parents[1]

Stream = Callable[[Target], StreamStatus]


class Bystander:
    """A healthy stream with one growing prompt, and a thread that queries it all the time."""

    def __init__(self, indexer: Indexer, publisher: Publisher) -> None:
        self.longest_pause = 0.0
        self.healed_after = 0.0  # measured by the test that uses this stream
        self._indexer = indexer
        self._publisher = publisher
        self._leaving = threading.Event()
        self._wrong: list[tuple[int, int, int]] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Bystander:
        source = EventSource(0, self._publisher.endpoint, self._publisher.replay_endpoint)
        self._indexer.register(Registration(HEALTHY, source))
        self._publisher.wait_for_subscriber()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leaving.set()
        self._thread.join()
        eventually(lambda: self._matched() == len(self._publisher.batches))
        assert not self._wrong, "(matched before, matched, published)"

    def _run(self) -> None:
        before, answered_at = 0, time.monotonic()
        while not self._leaving.wait(0.002):
            number = len(self._publisher.batches)
            if number < 500:
                self._publisher.publish(BlockStored([number + 1], number or None, [7], 1))
            matched = self._matched()
            if not before <= matched <= len(self._publisher.batches):
                self._wrong.append((before, matched, len(self._publisher.batches)))
            now = time.monotonic()
            self.longest_pause = max(self.longest_pause, now - answered_at)
            before, answered_at = matched, now

    def _matched(self) -> int:
        return cached_tokens(self._indexer, "n", [7] * 500)


def cached_tokens(indexer: Indexer, model: str, prompt: list[int]) -> int:
    """Return the cached tokens of a prompt at the only target of a model."""
    return max((match.matched_tokens for match in indexer.longest(MatchQuery(model, prompt))), default=0)


@pytest.fixture(autouse=True)
def bystander(
    running: Indexer, publishers: Callable[..., Publisher], request: pytest.FixtureRequest
) -> Iterator[Bystander]:
    with capture_logs(), Bystander(running, publishers()) as bystander:
        yield bystander
    pause = f"the healthy stream paused {bystander.longest_pause * 1000:.0f} ms at most"
    print(f"\n{request.node.name}:\n    healed after {bystander.healed_after:.3f} s; {pause}")


@pytest.fixture
def heals(indexer: Indexer, bystander: Bystander) -> Callable[[Engine, float], None]:
    """Function that waits until the index agrees with the engine on every prompt, and records the time."""

    def agrees(engine: Engine) -> bool:
        return all(cached_tokens(indexer, "m", list(prompt)) == engine.hit(prompt) for prompt in engine.prompts)

    def wait(engine: Engine, since: float) -> None:
        eventually(lambda: agrees(engine))
        bystander.healed_after = time.monotonic() - since

    return wait


@pytest.fixture
def follow(running: Indexer) -> Callable[..., None]:
    def follow(publisher: Publisher, replay: bool = True) -> None:
        source = EventSource(0, publisher.endpoint, publisher.replay_endpoint if replay else None)
        running.register(Registration(FAULTY, source))
        publisher.wait_for_subscriber()

    return follow


@pytest.fixture
def run_engine() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Function that starts engines in processes of their own."""
    running: list[subprocess.Popen[str]] = []

    def run(live: str, replay: str, seed: int, steps: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(HELPERS / "engine_process.py"), live, replay, str(seed), str(steps)]
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return running[-1]

    yield run
    for process in running:
        process.kill()
        process.communicate()


def work(engine: Engine, publisher: Publisher, batches: int, loss: float = 0.0) -> None:
    """Publish random steps of an engine. The share `loss` of them is not sent live; the last step always is."""
    random = Random(engine.seed)
    for number in reversed(range(batches)):
        publisher.publish(*engine.step(random), lost=number > 0 and random.random() < loss)


@pytest.mark.parametrize("replay", [True, False])
def test_publisher_restart_on_same_port_clears_its_target(
    replay: bool, publisher: Publisher, follow: Callable[..., None], heals: Callable[..., None], stream: Stream
) -> None:
    follow(publisher, replay)
    before = Engine(1)
    work(before, publisher, 500)
    heals(before, time.monotonic())
    publisher.restart()
    since = time.monotonic()
    publisher.wait_for_subscriber()
    after = Engine(1)
    work(after, publisher, 300)
    after.prompts |= before.prompts
    heals(after, since)
    eventually(lambda: stream(FAULTY).state is StreamState.LIVE)
    assert stream(FAULTY).sequence.restarts == 1


def test_index_recovers_from_an_engine_killed_while_publishing(
    running: Indexer, run_engine: Callable[..., subprocess.Popen[str]], heals: Callable[..., None], stream: Stream
) -> None:
    first = run_engine("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", 1, 0)
    assert first.stdout is not None
    live, replay = first.stdout.readline().split()
    running.register(Registration(FAULTY, EventSource(0, live, replay)))
    eventually(lambda: (stream(FAULTY).last_seq or 0) > 500)
    first.kill()
    first.wait()
    second = run_engine(live, replay, 2, 1000)
    assert second.stdout is not None
    second.stdout.readline()
    since = time.monotonic()
    engine, random = Engine(2), Random(2)
    for _ in range(1000):
        engine.step(random)
    heals(engine, since)
    assert stream(FAULTY).sequence.restarts == 1
    eventually(lambda: stream(FAULTY).state is StreamState.LIVE)


def test_index_recovers_from_30_percent_lost_live_batches(
    publisher: Publisher, follow: Callable[..., None], heals: Callable[..., None], stream: Stream
) -> None:
    follow(publisher)
    engine = Engine(3)
    work(engine, publisher, 3000, loss=0.3)
    heals(engine, time.monotonic())
    eventually(lambda: stream(FAULTY).state is StreamState.LIVE)
    assert stream(FAULTY).sequence.lost_batches == 0


def test_index_recovers_from_replays_without_half_of_their_batches(
    publisher: Publisher, follow: Callable[..., None], heals: Callable[..., None], stream: Stream
) -> None:
    publisher.halves_replays = True
    engine = Engine(4)
    work(engine, publisher, 1000)
    follow(publisher)
    work(engine, publisher, 500, loss=0.3)
    since = time.monotonic()
    heals(engine, since)
    assert stream(FAULTY).sequence.replays > 2


def test_losses_without_replay_end_with_a_cleared_cache(
    publisher: Publisher, follow: Callable[..., None], heals: Callable[..., None], stream: Stream
) -> None:
    """Without replay, the stream is lost until the engine clears its cache."""
    publisher.silent = True
    follow(publisher)
    engine = Engine(5)
    work(engine, publisher, 1000, loss=0.1)
    eventually(lambda: stream(FAULTY).last_seq == 999)
    assert stream(FAULTY).state is StreamState.LOST
    publisher.publish(engine.clear(), *engine.step(Random(0)))
    heals(engine, time.monotonic())
    eventually(lambda: stream(FAULTY).state is StreamState.LIVE)


def test_10000_malformed_messages_do_not_affect_batches(
    publisher: Publisher, follow: Callable[..., None], heals: Callable[..., None], stream: Stream
) -> None:
    follow(publisher)
    engine, random = Engine(6), Random(6)
    unreadable = [b"", b"\xc1", b"\x93\x01", b"\x81\x01\x02", b"\x92\x01\x02", b"not msgpack", b"\x92\xc0\x90"]
    frames = [[b""], [b""] * 2, [b""] * 4, [b"", b"", b""], [b"", b"seven b", b""], [b"", b"nine byte", b"\x90"]]
    for number in range(10_000):
        if number % 5 == 0:
            publisher.send(len(publisher.batches), random.choice(unreadable))
        elif number % 5 == 1:
            events = [*map(_as_sent, engine.step(random)), _invalid_event(random)]
            publisher.send(len(publisher.batches), msgspec.msgpack.encode([time.time(), events, 0]))
        else:
            publisher.send_raw([*random.choice(frames)])
    since = time.monotonic()
    heals(engine, since)
    eventually(lambda: stream(FAULTY).state is StreamState.LIVE)
    eventually(lambda: stream(FAULTY).unreadable.bad_frames == 8000)  # some arrive after the last batch
    status = stream(FAULTY)
    assert status.unreadable.bad_events == 2000


def test_index_recovers_from_random_frames(
    publisher: Publisher, follow: Callable[..., None], heals: Callable[..., None]
) -> None:
    """Random frames with random sequence numbers arrive between batches, which can be replayed."""
    follow(publisher)
    engine, random = Engine(7), Random(7)
    for _ in range(3000):
        if random.random() < 0.2:
            publisher.publish(*engine.step(random))
        payload = bytearray(publisher.batches[-1][1] if publisher.batches else b"\x90")
        for _ in range(random.randint(0, 4)):
            payload[random.randrange(len(payload))] = random.randrange(256)
        seq = random.choice([0, 5, len(publisher.batches) + random.randint(1, 9), 2**63, 2**64 - 1])
        frames = live_frames(b"", seq, bytes(payload))
        frames[random.randrange(3)] = random.choice([frames[0], random.randbytes(random.randrange(20))])
        publisher.send_raw(frames[: random.choice([1, 2, 3, 3, 3, 3])])
    publisher.publish(*engine.step(random))
    heals(engine, time.monotonic())


def test_burst_beyond_the_reader_never_blocks_the_publisher(
    publishers: Callable[..., Publisher], follow: Callable[..., None], heals: Callable[..., None], stream: Stream
) -> None:
    """ZeroMQ buffers 1000 live batches of the publisher and drops the others."""
    alone, followed = publishers(hwm=1000), publishers(hwm=1000)
    follow(followed)
    engine, random = Engine(8), Random(8)
    steps = [encode_batch(EventBatch(time.time(), engine.step(random))) for _ in range(8000)]
    seconds = []
    for publisher in (alone, followed):
        began = time.monotonic()
        for seq, payload in enumerate(steps):
            publisher.send(seq, payload)
        seconds.append(time.monotonic() - began)
    since = time.monotonic()
    print(
        f"\n8000 batches sent in {seconds[0]:.3f} s without a subscriber, in {seconds[1]:.3f} s to a subscriber",
        end="",
    )
    followed.publish()
    eventually(lambda: stream(FAULTY).state is StreamState.LIVE)  # before the matches, which delay the reader
    heals(engine, since)


def _as_sent(event: Event) -> object:
    """Return an event as the builtin types that MessagePack decodes."""
    (encoded,) = msgspec.msgpack.decode(encode_batch(EventBatch(0.0, [event])))[1]
    return encoded


def _invalid_event(random: Random) -> object:
    """Return a random value that is no event, or an invalid one."""
    return random.choice(
        [
            {"type": "BlockStored"},
            {"type": "BlockStored", "block_hashes": 5, "parent_block_hash": None, "token_ids": [], "block_size": 1},
            ["BlockStored", ["x"], None, [1], 1, None, None],
            {"type": "BlockRemoved", "block_hashes": [{}]},
            None,
            [],
            7,
        ]
    )
