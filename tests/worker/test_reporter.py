"""The reporter: the reporting rank, its batches, slow and late subscribers, and its end."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from waiting import eventually

from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, WireForm, decode_batch
from kvevents.frames import SNAPSHOT_START, is_snapshot, parse_live, parse_replay, parse_snapshot, replay_request
from worker import EventPublisher, ParallelRanks, PublisherConfig, Reporter, ZmqEventPublisher

DEADLINE_S = 60.0
ANY_PORT = '{"publisher": "zmq", "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}'


class Recorder(EventPublisher):
    """Keeps the batches."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[EventBatch] = []

    def publish(self, batch: EventBatch) -> None:
        self.batches.append(batch)

    def shutdown(self) -> None:
        return


@pytest.fixture
def make() -> Iterator[Callable[..., Reporter]]:
    made: list[Reporter] = []

    def reporter(publisher: EventPublisher | None = None, **fields: Any) -> Reporter:
        endpoints = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0", "bind": True}
        made.append(Reporter(publisher or ZmqEventPublisher(0, **{**endpoints, **fields})))
        return made[-1]

    yield reporter
    for each in made:
        each.shutdown()


@pytest.fixture
def recorded(make: Callable[..., Reporter]) -> tuple[Reporter, list[EventBatch]]:
    """A reporter after its first step, which reports a clear, and its later batches."""
    recorder = Recorder()
    reporter = make(recorder)
    reporter.step()
    assert [batch.events for batch in recorder.batches] == [[AllBlocksCleared()]]
    recorder.batches.clear()
    return reporter, recorder.batches


@pytest.fixture
def dealer() -> Iterator[Callable[..., zmq.Socket[bytes]]]:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        opened = []

        def connect(reporter: Reporter, kind: int = zmq.DEALER, hwm: int = 1000) -> zmq.Socket[bytes]:
            assert isinstance(reporter.publisher, ZmqEventPublisher)
            sock = context.socket(kind)
            sock.rcvtimeo = int(DEADLINE_S * 1000)
            sock.rcvhwm = hwm
            if kind == zmq.SUB:
                sock.subscribe(b"")
            sock.connect(reporter.publisher.endpoint if kind == zmq.SUB else str(reporter.publisher.replay_endpoint))
            opened.append(sock)
            return sock

        yield connect
        for sock in opened:
            sock.close(0)


def store(reporter: Reporter, *blocks: int) -> None:
    for block in blocks:
        reporter.stored([block], None, [block, block], 2)


def replayed(sock: zmq.Socket[bytes], start: int) -> list[int]:
    """The numbers of the batches that a replay brings."""
    sock.send_multipart(replay_request(start))
    seqs = []
    while (frame := parse_replay(sock.recv_multipart())) is not None:
        seqs.append(frame.seq)
    return seqs


def snapshot_of(sock: zmq.Socket[bytes]) -> tuple[int | None, list[Any]]:
    """Ask for a snapshot; the batch after which it was taken, if there is one, and its events."""
    sock.send_multipart(replay_request(SNAPSHOT_START))
    seq, events, number = None, [], 0
    while is_snapshot(parts := sock.recv_multipart()):
        part, frame = parse_snapshot(parts)
        assert (part, frame.seq) == (number, frame.seq if seq is None else seq)
        seq, number = frame.seq, number + 1
        events += decode_batch(frame.payload).events if frame.payload else []
    assert parse_replay(parts) is None
    return seq, events


@pytest.mark.parametrize(
    "ranks", [ParallelRanks(tp=1), ParallelRanks(cp=2), ParallelRanks(pp=1), ParallelRanks(dp=1, tp=3)]
)
def test_ranks_with_equal_blocks_are_silent_and_log_it(ranks: ParallelRanks, caplog: pytest.LogCaptureFixture) -> None:
    threads = threading.active_count()
    with caplog.at_level(logging.INFO, "worker.reporter"):
        reporter = Reporter.create(ANY_PORT, ranks)
    assert not reporter.publishes
    assert f"TP rank {ranks.tp}, CP rank {ranks.cp}, PP rank {ranks.pp}" in (reporter.silent_because or "")
    assert f"DP rank {ranks.dp} reports nothing here: this is TP rank" in caplog.text
    assert threading.active_count() == threads
    reporter.stored([1], None, [1], 1)
    reporter.removed([1])
    reporter.cleared()
    reporter.step()
    reporter.shutdown()


def test_one_process_of_dp_rank_reports() -> None:
    everybody = [
        ParallelRanks(dp=dp, tp=tp, cp=cp, pp=pp) for dp in (0, 1) for tp in (0, 1) for cp in (0, 1) for pp in (0, 1)
    ]
    reporters = [Reporter.create(ANY_PORT, ranks) for ranks in everybody]
    reporting = [ranks for ranks, reporter in zip(everybody, reporters, strict=True) if reporter.publishes]
    assert reporting == [ParallelRanks(dp=0), ParallelRanks(dp=1)]
    for reporter in reporters:
        reporter.shutdown()


@pytest.mark.parametrize("config", [None, "", "{}", '{"publisher": "null"}', PublisherConfig()])
def test_null_publisher_reports_nothing(config: str | PublisherConfig | None) -> None:
    reporter = Reporter.create(config)
    assert reporter.silent_because == "KV events are switched off"
    reporter.stored([1], None, ["not looked at"], 1)  # type: ignore[list-item]
    reporter.shutdown()


def test_configuration_selects_dialect() -> None:
    reporter = Reporter.create('{"publisher": "zmq", "endpoint": "tcp://*:0", "wire_form": "sglang-arrays"}')
    assert reporter.publisher.wire_form is WireForm.SGLANG_ARRAYS
    reporter.shutdown()
    with pytest.raises(ValueError, match="wire_form"):
        Reporter.create('{"publisher": "zmq", "endpoint": "tcp://*:0", "wire_form": "trt"}')


@pytest.mark.usefixtures("steps_only")
def test_step_is_one_batch(recorded: tuple[Reporter, list[EventBatch]]) -> None:
    reporter, batches = recorded
    reporter.step()
    assert batches == []
    reporter.stored([1, 2], None, (5, 6, 7, 8), 2, lora_name="sql", medium="CPU")
    reporter.removed([1], medium="CPU")
    reporter.cleared()
    reporter.step()
    [batch] = batches
    assert batch.events == [
        BlockStored([1, 2], None, [5, 6, 7, 8], 2, None, "CPU", "sql", [None, None]),
        BlockRemoved([1], "CPU"),
        AllBlocksCleared(),
    ]
    assert abs(batch.ts - time.time()) < DEADLINE_S


@pytest.mark.usefixtures("steps_only")
def test_last_reference_removes_block(recorded: tuple[Reporter, list[EventBatch]]) -> None:
    reporter, batches = recorded
    store(reporter, 1, 1)
    reporter.removed([1])
    reporter.step()
    reporter.removed([1])
    reporter.removed([1])
    reporter.step()
    assert [batch.events for batch in batches] == [
        [BlockStored([1], None, [1, 1], 2, medium="GPU")],
        [BlockRemoved([1], "GPU")],
    ]
    assert reporter.unknown_removed == 1


@pytest.mark.usefixtures("steps_only")
def test_tokens_are_accepted_in_any_sequence_type(recorded: tuple[Reporter, list[EventBatch]]) -> None:
    reporter, batches = recorded
    reporter.stored([1], None, array("q", [5, 6]), 2)
    reporter.report([BlockStored([2], 1, [7, 8], 2)])
    reporter.step()
    assert [event.token_ids for event in batches[0].events] == [[5, 6], [7, 8]]  # type: ignore[union-attr]


def test_engine_without_steps_is_flushed_by_timer(recorded: tuple[Reporter, list[EventBatch]]) -> None:
    reporter, batches = recorded
    store(reporter, 1)
    eventually(lambda: len(batches) == 1)
    store(reporter, *range(2, 1002))
    assert len(batches) >= 4, "a batch has a bound"


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1.0], None, [1], 1), {}, "block_hashes: a block hash is bytes or int"),
        (([2**64], None, [1], 1), {}, "block_hashes: a hash has more than 64 bits"),
        (([1], "parent", [1], 1), {}, "parent_block_hash"),
        (([1, 2], None, [1, 2, 3], 2), {}, "token_ids: 3 for 2 blocks of 2 tokens"),
        (([1], None, [-1], 1), {}, "token_ids"),
        (([1], None, [1], 1), {"extra_keys": []}, "extra_keys: 0 entries for 1 blocks"),
        (([1], None, [1], 1), {"extra_keys": [[object()]]}, "extra_keys"),
    ],
)
def test_invalid_reports_are_named_and_not_held(
    recorded: tuple[Reporter, list[EventBatch]], arguments: Any, options: Any, message: str
) -> None:
    reporter, batches = recorded
    with pytest.raises(ValueError, match=message):
        reporter.stored(*arguments, **options)
    reporter.step()
    assert batches == []


def test_sglang_dialect_accepts_integer_hashes_only(make: Callable[..., Reporter]) -> None:
    with pytest.raises(ValueError, match="int in the sglang dialect"):
        make(wire_form=WireForm.SGLANG_MAPS).stored([b"\x01" * 32], None, [1], 1)


def test_snapshot_repairs_dropped_batches(
    make: Callable[..., Reporter], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    reporter = make(max_queue_size=2)
    for block in range(2000):
        store(reporter, block)
        reporter.step()
    assert reporter.dropped > 0
    sock, last = dealer(reporter), reporter.publisher.last_seq
    eventually(lambda: replayed(sock, last) == [last])
    assert len(replayed(sock, 0)) == last + 1 - reporter.dropped
    seq, events = snapshot_of(sock)
    assert seq == reporter.publisher.last_seq
    assert events[0] == AllBlocksCleared()
    assert {event.block_hashes[0] for event in events[1:]} == set(range(2000))


def test_snapshot_includes_unsent_changes(
    make: Callable[..., Reporter], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    reporter = make()
    store(reporter, 1, 2)
    reporter.removed([1])
    seq, events = snapshot_of(dealer(reporter))
    assert seq == reporter.publisher.last_seq
    assert [event.block_hashes for event in events[1:]] == [[2]]


def test_snapshot_is_sent_to_requesting_client_only(
    make: Callable[..., Reporter], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    """Other subscribers read on as if nothing had been."""
    reporter = make()
    sub, sock = dealer(reporter, zmq.SUB), dealer(reporter)
    while not sub.poll(20):
        reporter.cleared()
        reporter.step()
    store(reporter, 1)
    reporter.step()
    snapshot_of(sock)
    store(reporter, 2)
    reporter.step()
    frames = [parse_live(sub.recv_multipart())]
    while frames[-1].seq < reporter.publisher.last_seq:
        frames.append(parse_live(sub.recv_multipart()))
    assert [frame.seq for frame in frames] == list(range(frames[0].seq, frames[0].seq + len(frames)))
    told = [event for frame in frames for event in decode_batch(frame.payload).events]
    assert [event.block_hashes for event in told if isinstance(event, BlockStored)] == [[1], [2]]


def test_publisher_without_cache_has_no_snapshot(
    make: Callable[..., Reporter], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    reporter = make()
    store(reporter, 1)
    reporter.step()
    assert isinstance(reporter.publisher, ZmqEventPublisher)
    reporter.publisher.offer_snapshots(lambda: None)
    assert snapshot_of(dealer(reporter)) == (None, [])


def test_failed_snapshot_does_not_stop_publisher(
    make: Callable[..., Reporter], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    reporter = make()
    publisher = reporter.publisher
    assert isinstance(publisher, ZmqEventPublisher)

    def broken() -> None:
        raise LookupError("broken")

    publisher.offer_snapshots(broken)
    store(reporter, 1)
    reporter.step()
    sock = dealer(reporter)
    sock.send_multipart(replay_request(SNAPSHOT_START))
    eventually(lambda: publisher.abandoned_replays == 1)
    assert not sock.poll(100), "nobody is told that this was all"
    assert replayed(sock, 0) == [0]


def test_live_batches_continue_during_slow_snapshot(
    make: Callable[..., Reporter], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    reporter = make()
    for block in range(20_000):
        reporter.stored([block], None, [block] * 128, 128)
    reporter.step()
    slow, sub = dealer(reporter, hwm=1), dealer(reporter, zmq.SUB)
    slow.send_multipart(replay_request(SNAPSHOT_START))
    first = slow.recv_multipart()
    assert is_snapshot(first)
    while not sub.poll(20):
        reporter.cleared()
        reporter.step()
    sub.recv_multipart()
    told = 0
    while is_snapshot(parts := slow.recv_multipart()):
        payload = parse_snapshot(parts)[1].payload
        told += len(decode_batch(payload).events) if payload else 0
    assert told == 20_000, "of the time when it was asked for, and whole"


def test_overtaken_replay_has_no_end(make: Callable[..., Reporter], dealer: Callable[..., zmq.Socket[bytes]]) -> None:
    """An end message means that the replay is complete."""
    reporter = make(buffer_steps=500)
    publisher = reporter.publisher
    assert isinstance(publisher, ZmqEventPublisher)
    big = EventBatch(0.0, [BlockStored([1], None, list(range(30_000)), 30_000)])
    for _ in range(500):
        publisher.publish(big)
    slow = dealer(reporter, hwm=1)
    other = dealer(reporter)
    eventually(lambda: replayed(other, publisher.last_seq) == [publisher.last_seq])
    slow.send_multipart(replay_request(0))
    assert parse_replay(slow.recv_multipart()) is not None
    for _ in range(1000):
        publisher.publish(EventBatch(0.0, []))
    eventually(lambda: publisher.abandoned_replays == 1)
    while slow.poll(300):
        assert parse_replay(slow.recv_multipart()) is not None, "the end was told"


def test_shutdown_sends_rest_and_leaves_no_thread(
    make: Callable[..., Reporter], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    threads = set(threading.enumerate())
    reporter = make()
    sub = dealer(reporter, zmq.SUB)
    while not sub.poll(20):
        reporter.cleared()
        reporter.step()
    store(reporter, 7)
    reporter.shutdown()
    reporter.shutdown()
    assert set(threading.enumerate()) <= threads
    last = parse_live(sub.recv_multipart())
    while sub.poll(100):
        last = parse_live(sub.recv_multipart())
    assert decode_batch(last.payload).events[-1] == BlockStored([7], None, [7, 7], 2, medium="GPU")
    with pytest.raises(RuntimeError, match="shut down"):
        store(reporter, 8)


def test_process_ends_without_shutdown() -> None:
    script = f"""
from worker import Reporter
reporter = Reporter.create('{ANY_PORT}')
reporter.stored([1], None, [1], 1)
"""
    subprocess.run([sys.executable, "-c", script], timeout=120, check=True)


def in_fork(reporter: Reporter, results: Any) -> None:
    for call in (lambda: store(reporter, 9), reporter.step, reporter.shutdown):
        try:
            results.put(call())
        except RuntimeError as error:
            results.put(str(error))
    own = Reporter.create(ANY_PORT)
    store(own, 1)
    own.shutdown()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer Pythons: of a fork beside threads
def test_forked_process_cannot_report_and_does_no_harm(
    make: Callable[..., Reporter], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    reporter = make()
    store(reporter, 1)
    reporter.step()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    child = context.Process(target=in_fork, args=(reporter, results))
    child.start()
    child.join(DEADLINE_S)
    assert child.exitcode == 0
    message = f"this reporter belongs to process {os.getpid()}: create one after the fork"
    assert [results.get() for _ in range(3)] == [message, message, None]
    _, events = snapshot_of(dealer(reporter))
    assert [event.block_hashes for event in events[1:]] == [[1]]


def test_reporter_cannot_be_pickled(make: Callable[..., Reporter]) -> None:
    with pytest.raises(TypeError, match="pass the configuration"):
        pickle.dumps(make())


def test_threads_can_report_concurrently(
    make: Callable[..., Reporter], dealer: Callable[..., zmq.Socket[bytes]]
) -> None:
    reporter = make()

    def work(first: int) -> None:
        for block in range(first, first + 200):
            store(reporter, block, block)
            reporter.removed([block])
            reporter.step()

    threads = [threading.Thread(target=work, args=(1000 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    _, events = snapshot_of(dealer(reporter))
    assert len(events) == 801


def test_worker_imports_base_dependencies_only() -> None:
    """Whatever else is installed cannot be imported here, and is not missed."""
    script = f"""
import sys
class OnlyBase:
    def find_spec(self, name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in sys.stdlib_module_names and root not in ("worker", "kvevents", "zmq", "msgspec"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, OnlyBase())
from worker import ParallelRanks, Reporter
reporter = Reporter.create('{ANY_PORT}', ParallelRanks())
reporter.stored([1], None, [1], 1)
reporter.shutdown()
print("reported")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "reported", done.stderr


def test_documented_example_runs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "engine-authors.md").read_text()
    example = text.split("```python\n")[1].split("```")[0]
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    shown = text.split("It prints\n\n")[1].split("\n\n")[0]
    assert done.stdout.split() == shown.split()
