"""Streams over real sockets: the index ends up with the blocks of the publisher."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, MutableMapping
from selectors import DefaultSelector
from threading import Event, Thread
from typing import Any, NoReturn

import msgspec
import pytest
import structlog
import zmq
from engine_publisher import DEADLINE_S, Publisher
from structlog.testing import capture_logs
from waiting import eventually

from indexer import Indexer, MatchQuery, Registration, Target
from indexer.dump import read_dump
from indexer.inbox import Inbox, Reading
from indexer.indexer import make_index
from indexer.reference.inbox import PythonInbox
from indexer.streams.reader import StreamReader, StreamStatus, make_inbox
from indexer.streams.sequence import Action, StreamSequence, StreamState
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventSource, encode_batch

TARGET = Target("w", 0, "m")

Stream = Callable[[Target], StreamStatus]
CaughtUp = Callable[..., None]


def block(number: int) -> BlockStored:
    """Return the event of block `number` of a prompt whose tokens are all 7."""
    return BlockStored([number + 1], number or None, [7], 1)


def matched(indexer: Indexer, target: Target = TARGET) -> int:
    return held(indexer, [7] * 1000, target)


def held(indexer: Indexer, tokens: list[int], target: Target = TARGET) -> int:
    """Return the cached tokens of a prompt at a target."""
    matches = indexer.match(MatchQuery(target.model, tokens))
    return next((match.matched_tokens for match in matches if match.target == target), 0)


@pytest.fixture
def register(running: Indexer) -> Callable[..., None]:
    def register(publisher: Publisher, replay: bool = True, target: Target = TARGET, **fields: Any) -> None:
        replay_endpoint = publisher.replay_endpoint if replay else None
        source = EventSource(target.dp_rank, publisher.endpoint, replay_endpoint, publisher.topic.decode())
        running.register(Registration(target, source, **fields))
        publisher.wait_for_subscriber()

    return register


def test_late_subscriber_gets_all_batches_by_replay(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp, stream: Stream
) -> None:
    for number in range(200):
        publisher.publish(block(number))
    register(publisher)
    caught_up(TARGET, 199, StreamState.LIVE)
    assert matched(indexer) == 200
    assert stream(TARGET).sequence.batches == 200
    assert stream(TARGET).received_at is None, "no batch was received live"


def test_late_subscriber_without_replay_is_lost_after_the_next_batch(
    publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp, stream: Stream
) -> None:
    publisher.publish(block(0))
    register(publisher, replay=False)
    eventually(lambda: stream(TARGET).state is StreamState.LIVE)
    publisher.publish(block(1))
    caught_up(TARGET, 1, StreamState.LOST)
    assert stream(TARGET).sequence.lost_batches == 1


@pytest.mark.parametrize("legacy", [False, True])
def test_gap_is_filled_by_a_replay(
    legacy: bool,
    indexer: Indexer,
    publisher: Publisher,
    register: Callable[..., None],
    caught_up: CaughtUp,
    stream: Stream,
) -> None:
    publisher.legacy = legacy
    register(publisher)
    for number in range(10):
        publisher.publish(block(number), lost=3 <= number < 7)
    caught_up(TARGET, 9, StreamState.LIVE)
    assert matched(indexer) == 10
    assert stream(TARGET).sequence.lost_batches == 0


def test_gaps_in_a_replay_are_requested_again(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp
) -> None:
    for number in range(100):
        publisher.publish(block(number))
    publisher.dropped = {5, 6, 50, 99}
    register(publisher)
    caught_up(TARGET, 99, StreamState.LIVE)
    assert matched(indexer) == 100
    assert len(publisher.requests) > 1


def test_idle_check_finds_lost_last_batches(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp
) -> None:
    register(publisher)
    publisher.publish(block(0))
    caught_up(TARGET, 0, StreamState.LIVE)
    publisher.publish(block(1), lost=True)
    caught_up(TARGET, 1, StreamState.LIVE)
    assert matched(indexer) == 2


def test_stream_without_deadlines_is_not_checked(
    publishers: Callable[..., Publisher],
    register: Callable[..., None],
    caught_up: CaughtUp,
    stream: Stream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked_streams = []
    on_tick = StreamSequence.on_tick

    def look(sequence: StreamSequence, now: float) -> list[Action]:
        checked_streams.append(sequence.counters)
        return on_tick(sequence, now)

    monkeypatch.setattr(StreamSequence, "on_tick", look)
    idle, checked = publishers(), publishers()
    other = Target("w", 1, "m")
    register(idle, replay=False)
    register(checked, target=other)
    for publisher, target in ((idle, TARGET), (checked, other)):
        publisher.publish(block(0))
        caught_up(target, 0)
    eventually(lambda: stream(other).sequence.idle_checks >= 2)
    assert not any(counters is stream(TARGET).sequence for counters in checked_streams)
    assert len(checked_streams) < 8, "not at every tick"


def test_silent_replay_delays_no_other_stream(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp, stream: Stream
) -> None:
    publisher.silent = True
    register(publisher)
    publisher.publish(block(0))
    publisher.publish(block(1), lost=True)
    publisher.publish(block(2))
    caught_up(TARGET, 2, StreamState.LOST)
    assert matched(indexer) == 1
    assert stream(TARGET).sequence.lost_batches == 1
    assert publisher.requests


def test_closed_replay_endpoint_delays_no_stream(running: Indexer, publisher: Publisher, caught_up: CaughtUp) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.ROUTER) as socket:
        free = socket.bind_to_random_port("tcp://127.0.0.1")
    source = EventSource(0, publisher.endpoint, f"tcp://127.0.0.1:{free}")
    running.register(Registration(TARGET, source))
    publisher.wait_for_subscriber()
    for number in range(3):
        publisher.publish(block(number), lost=number == 1)
    caught_up(TARGET, 2, StreamState.LOST)
    publisher.publish(AllBlocksCleared(), block(0))
    caught_up(TARGET, 3)
    assert matched(running) == 1


@pytest.mark.parametrize("replay", [True, False])
def test_restarted_publisher_starts_empty(
    replay: bool, indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp
) -> None:
    register(publisher, replay)
    for number in range(5):
        publisher.publish(block(number))
    caught_up(TARGET, 4, StreamState.LIVE)
    publisher.restart()
    publisher.wait_for_subscriber()
    publisher.publish(BlockStored([100], None, [9], 1))
    publisher.publish(BlockStored([101], 100, [9], 1))
    caught_up(TARGET, 1, StreamState.LIVE)
    assert matched(indexer) == 0
    assert held(indexer, [9] * 3) == 2


def test_restart_is_detected_before_the_first_new_batch(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp, stream: Stream
) -> None:
    register(publisher)
    publisher.publish(block(0))
    caught_up(TARGET, 0, StreamState.LIVE)
    publisher.restart()
    caught_up(TARGET, None)
    eventually(lambda: matched(indexer) == 0)
    assert stream(TARGET).sequence.restarts == 1


def test_stream_state_is_published_with_the_index(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp, stream: Stream
) -> None:
    register(publisher)
    for number in range(10):
        publisher.publish(block(number))
    caught_up(TARGET, 9)
    seen = []

    def look(_logger: object, _method: str, event: MutableMapping[str, Any]) -> NoReturn:
        if event["event"] == "event stream read again from the start":  # the index does not have this state yet
            seen.append((stream(TARGET).last_seq, matched(indexer)))
        raise structlog.DropEvent

    processors = structlog.get_config()["processors"]
    usual, processors[:] = list(processors), [look]
    try:
        publisher.restart()
        caught_up(TARGET, None)
    finally:
        processors[:] = usual
    assert matched(indexer) == 0
    assert seen == [(9, 10)]


def test_restart_beyond_the_old_number_is_detected(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp
) -> None:
    register(publisher)
    for number in range(3):
        publisher.publish(block(number))
    caught_up(TARGET, 2, StreamState.LIVE)
    publisher.restart()
    for _ in range(3):
        publisher.publish(BlockStored([100], None, [9], 1), lost=True)
    publisher.wait_for_subscriber()
    publisher.publish(BlockStored([101], 100, [9], 1))
    caught_up(TARGET, 3)
    eventually(lambda: held(indexer, [9] * 3) == 2)
    caught_up(TARGET, 3, StreamState.LIVE)
    assert matched(indexer) == 0


def test_unreadable_input_is_counted_and_logged_once(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp, stream: Stream
) -> None:
    register(publisher)
    with capture_logs() as logs:
        publisher.publish(block(0))
        publisher.send_raw([b"", b"one frame too few"])
        publisher.send_raw([b"", b"short", b""])
        publisher.send(1, b"\xc1 no batch at all")
        publisher.publish(BlockStored([50, 50], None, [1, 2], 1), block(1), BlockRemoved([999]))
        caught_up(TARGET, 2, StreamState.LIVE)
    assert matched(indexer) == 2
    assert stream(TARGET).unreadable.bad_frames == 3
    assert stream(TARGET).unreadable.bad_events == 1
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [(entry["event"], entry["worker"]) for entry in warnings] == [("stream message skipped", "w")]


def test_only_the_registered_topic_is_read(
    indexer: Indexer, publishers: Callable[..., Publisher], register: Callable[..., None], caught_up: CaughtUp
) -> None:
    publisher = publishers(b"kv-events")
    register(publisher)
    publisher.send_raw([b"other", b"\0" * 8, b"not for us"])
    publisher.publish(block(0))
    caught_up(TARGET, 0, StreamState.LIVE)
    assert matched(indexer) == 1


def test_streams_of_two_ranks_are_separate(
    indexer: Indexer, publishers: Callable[..., Publisher], register: Callable[..., None], caught_up: CaughtUp
) -> None:
    ranks = [Target("w", rank, "m") for rank in range(2)]
    for blocks, target in enumerate(ranks, 1):
        publisher = publishers()
        register(publisher, target=target)
        for number in range(blocks):
            publisher.publish(block(number))
        caught_up(target, blocks - 1)
    assert [matched(indexer, target) for target in ranks] == [1, 2]


def test_identical_registration_is_ignored_and_changed_one_restarts(
    indexer: Indexer, publishers: Callable[..., Publisher], register: Callable[..., None], caught_up: CaughtUp
) -> None:
    first, second = publishers(), publishers()
    register(first)
    first.publish(block(0))
    caught_up(TARGET, 0)
    indexer.register(indexer.registered()[0])
    assert matched(indexer) == 1
    register(second)
    caught_up(TARGET, None)
    assert matched(indexer) == 0
    second.publish(block(0))
    first.publish(block(1))
    caught_up(TARGET, 0)
    assert matched(indexer) == 1


def test_reregistered_target_has_no_blocks_of_the_old_stream(
    indexer: Indexer, publishers: Callable[..., Publisher], register: Callable[..., None], caught_up: CaughtUp
) -> None:
    """Batches of the old publisher that are still in transit are not applied."""
    old, new = publishers(), publishers()
    for round_ in range(20):
        register(old, replay=False)
        for _ in range(50):
            old.publish(block(0))
        indexer.unregister([TARGET])
        register(new, replay=False)
        new.publish(BlockStored([round_ + 1], None, [9], 1))
        caught_up(TARGET, round_)
        assert matched(indexer) == 0
        indexer.unregister([TARGET])


def kind_of_inbox(indexer: Indexer) -> type[Inbox]:
    with DefaultSelector() as others:
        return type(make_inbox(indexer.index, others.fileno()))


def expect_nothing(_inbox: Inbox, _socket: int, _seq: int | None, _largest: int) -> None:
    """Replace `Inbox.expect`, so that the caller handles all messages."""


def test_reregistered_target_shows_the_new_stream(
    indexer: Indexer,
    publishers: Callable[..., Publisher],
    register: Callable[..., None],
    caught_up: CaughtUp,
    stream: Stream,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A batch of the old stream that is being applied does not change the new stream's status."""
    old, new = publishers(), publishers()
    kind, applying, proceed = kind_of_inbox(indexer), Event(), Event()
    apply = kind.apply

    def apply_slowly(inbox: Inbox, places: Any) -> Any:
        if places:
            applying.set()
            assert proceed.wait(DEADLINE_S)
        return apply(inbox, places)

    with monkeypatch.context() as patched:
        patched.setattr(kind, "expect", expect_nothing)
        patched.setattr(kind, "apply", apply_slowly)
        register(old, replay=False)
        old.publish(block(0))
        assert applying.wait(DEADLINE_S)
        indexer.unregister([TARGET])
        register(new, replay=False)
        old.publish(block(1))
        assert (stream(TARGET).last_seq, stream(TARGET).state) == (None, StreamState.CONNECTING)
        proceed.set()
        new.publish(BlockStored([1], None, [9], 1))
        caught_up(TARGET, 0)
    assert matched(indexer) == 0


@pytest.fixture
def resume_reading(indexer: Indexer, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Function that resumes reading. Until its call, live messages wait, and are then received together."""
    kind, proceed = kind_of_inbox(indexer), Event()
    read = kind.read

    def read_later(inbox: Inbox, seconds: float) -> Reading:
        return read(inbox, seconds) if proceed.wait(0.001) else Reading([], [], [])

    monkeypatch.setattr(kind, "read", read_later)
    return proceed.set


_INVALID_EVENT = msgspec.msgpack.encode([0.0, [["BlockRemoved", ["no hash", None, 1.5]]]])


@pytest.mark.parametrize(
    ("between", "blocks", "bad_frames", "bad_events"),
    [
        (lambda _: None, 40, 0, 0),
        (lambda publisher: publisher.publish(block(20), lost=True), 41, 0, 0),
        (lambda publisher: publisher.send_raw([b"", b"two frames"]), 40, 1, 0),
        (lambda publisher: publisher.send_raw([b"", b"a number of 7"[:7], b""]), 40, 1, 0),
        (lambda publisher: publisher.send_raw([b""] * 1000), 40, 1, 0),
        (lambda publisher: publisher.send(20, b"no batch"), 40, 1, 0),
        (lambda publisher: publisher.send(20, _INVALID_EVENT), 40, 0, 1),
        (lambda publisher: publisher.publish(BlockRemoved([*range(10**6, 10**6 + 200_000)])), 40, 0, 0),
        (lambda publisher: publisher.publish(AllBlocksCleared()), 0, 0, 0),
    ],
    ids=["nothing", "gap", "short", "number", "long", "rejected", "odd", "huge", "clear"],
)
def test_unusual_message_within_a_run_loses_and_repeats_no_batch(
    between: Callable[[Publisher], Any],
    blocks: int,
    bad_frames: int,
    bad_events: int,
    indexer: Indexer,
    publishers: Callable[..., Publisher],
    register: Callable[..., None],
    caught_up: CaughtUp,
    stream: Stream,
    resume_reading: Callable[[], None],
) -> None:
    hostile, other = publishers(), publishers()
    neighbour = Target("other", 0, "m")
    register(hostile)
    register(other, target=neighbour)
    eventually(lambda: {stream(each).state for each in (TARGET, neighbour)} == {StreamState.LIVE})
    for number in range(20):
        hostile.publish(block(number))
        other.publish(block(number))
    between(hostile)
    for number in range(20, 40):
        hostile.publish(block(number + (blocks == 41)))
        other.publish(block(number))
    resume_reading()
    caught_up(TARGET, hostile.batches[-1][0], StreamState.LIVE)
    caught_up(neighbour, 39, StreamState.LIVE)
    status = stream(TARGET)
    assert status.sequence.batches == len(hostile.batches)
    assert (status.unreadable.bad_frames, status.unreadable.bad_events) == (bad_frames, bad_events)
    assert matched(indexer, neighbour) == 40
    found = [match for match in indexer.match(MatchQuery("m", [7] * 1000)) if match.target == TARGET]
    assert sum(match.matched_tokens for match in found) == blocks


def test_query_between_batches_sees_all_applied_batches(
    running: Indexer,
    publisher: Publisher,
    register: Callable[..., None],
    caught_up: CaughtUp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A query right after a read under heavy traffic sees the batches that are not reported yet."""
    kind, asked, stop = kind_of_inbox(running), Event(), Event()
    read = kind.read

    def read_and_wait_for_query(inbox: Inbox, seconds: float) -> Reading:
        reading = read(inbox, seconds)
        if (reading.unreported or (kind is PythonInbox and reading.received)) and not asked.is_set():
            asked.set()
            time.sleep(0.1)  # until the query has arrived
        return reading

    def publish() -> None:
        number = 1
        while not stop.wait(0.0002):
            publisher.publish(block(number))
            number += 1

    register(publisher)
    publisher.publish(block(0))
    caught_up(TARGET, 0)
    monkeypatch.setattr(kind, "read", read_and_wait_for_query)
    publishing = Thread(target=publish)
    publishing.start()
    try:
        assert asked.wait(DEADLINE_S)
        (saved,) = read_dump(running.dump(), "")
    finally:
        stop.set()
        publishing.join()
    dumped = saved.whole()
    assert sum(len(run.hashes) for run in dumped.runs) == dumped.stream.last_seq + 1


@pytest.mark.parametrize("expected", [True, False])
def test_received_batches_of_a_removed_stream_are_not_applied(
    expected: bool,
    indexer: Indexer,
    publishers: Callable[..., Publisher],
    register: Callable[..., None],
    caught_up: CaughtUp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kind, neighbour = kind_of_inbox(indexer), Target("other", 0, "m")
    read, reads, left = kind.read, Event(), Event()
    old, new, other = publishers(), publishers(), publishers()
    register(other, target=neighbour)

    def leave(inbox: Inbox, seconds: float) -> Reading:
        reads.set()
        reading = read(inbox, seconds)
        if (reading.batches or any(turn.messages for turn in reading.received)) and not left.is_set():
            indexer.unregister([TARGET])
            left.set()
        return reading

    if not expected:
        monkeypatch.setattr(kind, "expect", expect_nothing)
    register(old, replay=False)
    monkeypatch.setattr(kind, "read", leave)
    assert reads.wait(DEADLINE_S)
    old.publish(block(0))
    assert left.wait(DEADLINE_S)
    register(new)
    new.publish(BlockStored([1], None, [9], 1))
    other.publish(block(0))
    caught_up(TARGET, 0, StreamState.LIVE)
    caught_up(neighbour, 0, StreamState.LIVE)
    assert matched(indexer, neighbour) == 1
    assert matched(indexer) == 0


def test_unregistered_target_is_removed(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp
) -> None:
    register(publisher)
    publisher.publish(block(0))
    caught_up(TARGET, 0)
    indexer.unregister([TARGET])
    indexer.unregister([TARGET])
    assert indexer.registered() == []
    assert indexer.report(TARGET) is None
    eventually(lambda: indexer.index.runs == 0)


def test_target_without_stream_is_registered_without_blocks(running: Indexer) -> None:
    running.register(Registration(TARGET, None, block_size=16))
    report = running.report(TARGET)
    assert report is not None
    assert report.stream is None
    assert matched(running) == 0
    assert running.block_sizes("m") == {16}


def test_clear_by_call_is_visible_at_once(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp
) -> None:
    register(publisher)
    publisher.publish(block(0))
    caught_up(TARGET, 0)
    indexer.clear(TARGET)
    assert matched(indexer) == 0


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize("bad", ["nonsense", "tcp://127.0.0.1", "tcp://127.0.0.1:port", "smoke://signals"])
def test_invalid_endpoint_is_rejected_with_its_field(running: Indexer, field: str, bad: str) -> None:
    endpoints = {"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558", field: bad}
    with pytest.raises(ValueError, match=f"^{field}: .*{bad}"):
        running.register(Registration(TARGET, EventSource(0, **endpoints)))
    assert running.registered() == []


def test_many_workers_can_register_before_the_start() -> None:
    indexer = Indexer()
    for number in range(1500):
        indexer.register(Registration(Target(f"w{number}", 0, "m"), None))
        indexer.unregister([Target(f"w{number}", 0, "m")])
    indexer.start()
    indexer.stop()


def test_host_name_connects_to_an_ipv4_listener(running: Indexer, publisher: Publisher, caught_up: CaughtUp) -> None:
    endpoint = publisher.endpoint.replace("127.0.0.1", "localhost")
    running.register(Registration(TARGET, EventSource(0, endpoint)))
    publisher.wait_for_subscriber()
    publisher.publish(block(0))
    caught_up(TARGET, 0)


def test_ipv6_address_connects(running: Indexer, caught_up: CaughtUp) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context, context.socket(zmq.XPUB) as live:
        live.setsockopt(zmq.IPV6, 1)
        try:
            port = live.bind_to_random_port("tcp://[::1]")
        except zmq.ZMQError:
            pytest.skip("no IPv6 here")
        running.register(Registration(TARGET, EventSource(0, f"tcp://[::1]:{port}")))
        assert live.poll(10_000)
        live.send_multipart([b"", b"\0" * 8, b"\x92\x01\x90"])
        caught_up(TARGET, 0)


def test_resync_clears_and_reads_all_batches_again(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp, stream: Stream
) -> None:
    register(publisher)
    for number in range(3):
        publisher.publish(block(number))
    caught_up(TARGET, 2, StreamState.LIVE)
    publisher.batches[2] = (2, encode_batch(EventBatch(0.0, [])))  # replace the third batch
    before = stream(TARGET).began_at
    assert indexer.resync(TARGET)
    eventually(lambda: matched(indexer) == 2)
    eventually(lambda: stream(TARGET).state is StreamState.LIVE)
    status = stream(TARGET)
    assert (status.last_seq, status.sequence.resyncs, status.sequence.restarts) == (2, 1, 0)
    assert status.began_at > before


def test_resync_without_replay_returns_false(
    indexer: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp
) -> None:
    register(publisher, replay=False)
    publisher.publish(block(0))
    caught_up(TARGET, 0, StreamState.LIVE)
    assert not indexer.resync(TARGET)
    assert not indexer.resync(Target("nobody", 0, "m"))
    assert matched(indexer) == 1


def test_indexer_stops_with_unread_registrations(publishers: Callable[..., Publisher]) -> None:
    publisher = publishers()
    indexer = Indexer()
    indexer.start()
    source = EventSource(0, publisher.endpoint, publisher.replay_endpoint)
    for number in range(50):
        indexer.register(Registration(Target(f"w{number}", 0, "m"), source))
    stopping = Thread(target=indexer.stop, daemon=True)
    stopping.start()
    stopping.join(60)
    assert not stopping.is_alive()


def test_many_streams_can_be_followed(
    publisher: Publisher, running: Indexer, register: Callable[..., None], caught_up: CaughtUp
) -> None:
    """The number of streams exceeds ZeroMQ's default limit of sockets."""
    publisher.publish(block(0))
    targets = [Target("w", rank, "m") for rank in range(400)]
    for target in targets:
        register(publisher, target=target)
    for target in targets:
        caught_up(target, 0, StreamState.LIVE)
    assert len(running.match(MatchQuery("m", [7] * 10))) == len(targets)
    running.unregister(targets)


@pytest.mark.parametrize("replay", [True, False])
def test_stream_is_stale_while_its_publisher_is_disconnected(
    replay: bool,
    running: Indexer,
    publishers: Callable[..., Publisher],
    register: Callable[..., None],
    stream: Stream,
) -> None:
    publisher = publishers()
    register(publisher, replay=replay)
    publisher.publish(block(0))
    eventually(lambda: stream(TARGET).last_seq == 0 and stream(TARGET).state is StreamState.LIVE)
    publisher.close()
    eventually(lambda: stream(TARGET).state is StreamState.STALE)
    assert matched(running) == 1, "its blocks are still known"


def test_stream_is_stale_while_its_worker_is_suspended(
    running: Indexer, publisher: Publisher, register: Callable[..., None], caught_up: CaughtUp, stream: Stream
) -> None:
    register(publisher)
    publisher.publish(block(0))
    caught_up(TARGET, 0, StreamState.LIVE)
    running.suspend([TARGET])
    eventually(lambda: stream(TARGET).state is StreamState.STALE)
    publisher.publish(block(1))
    caught_up(TARGET, 1, StreamState.STALE)
    running.suspend([TARGET], False)
    caught_up(TARGET, 1, StreamState.LIVE)


@pytest.mark.parametrize(("hang_ups", "at_once", "reported"), [(1, 5.0, False), (4, 5.0, True), (4, 0.0, False)])
def test_repeated_early_disconnects_are_a_failed_handshake(
    hang_ups: int, at_once: float, reported: bool, running: Indexer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("indexer.streams.session._SOON_SECONDS", at_once)
    with socket.create_server(("127.0.0.1", 0)) as listener, capture_logs() as logs:

        def hang_up() -> None:
            for _ in range(hang_ups):
                connection, _ = listener.accept()
                connection.close()
            listener.accept()[0].close()  # earlier disconnections were noticed by now

        thread = Thread(target=hang_up)
        thread.start()
        running.register(Registration(TARGET, EventSource(0, f"tcp://127.0.0.1:{listener.getsockname()[1]}")))
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        if reported:
            eventually(lambda: logs)
    assert [line["event"] for line in logs] == (["handshake with the publisher failed"] if reported else [])


def test_sockets_use_tcp_keepalive_and_no_heartbeats() -> None:
    # libzmq's heartbeats close a connection whose queue is full, and may abort the process on the next connection.
    reader = StreamReader(make_index())
    stream = reader.open(TARGET, EventSource(0, "tcp://127.0.0.1:9", "tcp://127.0.0.1:9"))
    try:
        assert stream.replay is not None
        for each in (stream.live, stream.replay):
            assert each.getsockopt(zmq.HEARTBEAT_IVL) == 0
            assert each.getsockopt(zmq.TCP_KEEPALIVE) == 1
            assert each.getsockopt(zmq.TCP_KEEPALIVE_IDLE) == 5
    finally:
        stream.close()
        reader.stop()
