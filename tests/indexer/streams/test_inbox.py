"""Live messages have the same results in the Python inbox, the native inbox, and the native core without libzmq."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import NoReturn

import pytest
import zmq
from engine_publisher import DEADLINE_S
from hypothesis import given, settings
from hypothesis import strategies as st
from test_implementations import comparable, payload

from indexer import Index, Target
from indexer.inbox import Inbox
from indexer.native import CORES
from indexer.reference.inbox import PythonInbox
from indexer.reference.index import PythonIndex
from indexer.streams.reader import give_back, make_inbox
from kvevents import BlockStored, Event, EventBatch, encode_batch
from kvevents.frames import encode_seq, live_frames

if "native" in CORES:
    from indexer.native.inbox import NativeInbox

pytestmark = pytest.mark.skipif("native" not in CORES, reason="the native core is not built")


@st.composite
def live_messages(draw: st.DrawFn) -> list[list[bytes]]:
    """Draw the messages of one stream. Most are batches with consecutive sequence numbers."""
    messages: list[list[bytes]] = []
    seq = draw(st.sampled_from([0, 5, 2**64 - 2]))
    for content in draw(st.lists(payload(), max_size=6)):
        parts = live_frames(b"topic", seq, content)
        match draw(st.integers(0, 30)):
            case 0:
                parts[1] = draw(st.binary(max_size=9))
            case 1:
                parts = draw(st.lists(st.binary(max_size=9), min_size=1, max_size=4))
            case 2:
                parts[1] = encode_seq(draw(st.integers(0, 9)))
        messages.append(parts)
        seq = (seq + 1) % 2**64
    return messages


@settings(max_examples=40, deadline=None)
@given(st.lists(live_messages(), min_size=1, max_size=3))
def test_all_inboxes_receive_and_apply_the_same(streams: list[list[list[bytes]]]) -> None:
    """The inboxes are those of `inboxes`."""
    targets = targets_of(streams)
    seen = []
    for inbox, index in inboxes():
        with filled_sockets(*streams) as sockets, following(inbox, index, sockets) as places:
            batches, results, received, _ = inbox.read(0)
            assert (batches, results) == ([], [])
            by_place = {places[turn.socket]: inbox.messages(place) for place, turn in enumerate(received)}
            assert [by_place.get(place, []) for place in range(len(streams))] == streams
            results = inbox.apply([place for place, turn in enumerate(received) if turn.first is not None])
            assert not any(turn.messages for turn in inbox.read(0).received)
        turns = [turn._replace(socket=places[turn.socket]) for turn in received if turn.messages]
        seen.append(
            (turns, [(where, comparable(applied)) for where, applied in results], [*map(index.status, targets)])
        )
    assert seen[0] == seen[1] == seen[2]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(live_messages(), min_size=1, max_size=3),
    st.sampled_from([None, 0, 0, 5, 2**64 - 2]),
    st.sampled_from([60, 10**6, 10**6, 10**6]),
)
def test_expected_batches_are_applied_like_requested_ones(
    streams: list[list[list[bytes]]], first: int | None, largest: int
) -> None:
    """The native inbox applies expected batches itself, unless a round has other messages too."""
    seen = []
    for inbox, index in inboxes():
        with filled_sockets(*streams) as sockets, following(inbox, index, sockets) as places:
            for fd in places:
                inbox.expect(fd, first, largest)
            batches, results, received, _ = inbox.read(0)
            turns = [turn for turn in received if turn.messages]
            assert not (batches and turns)
            if isinstance(inbox, NativeInbox) and first is not None:
                assert all(turn.first == first for turn in batches)
                assert not turns or any(turn.first != first or turn.largest > largest for turn in turns)
            else:
                assert not batches
            runs = [(places[turn.socket], turn.first, turn.last, turn.payload, turn.size) for turn in batches]
            results = [((places[socket], seq), applied) for (socket, seq), applied in results]
            for place, turn in enumerate(received):
                if turn.first is not None:
                    last = turn.first + turn.messages - 1
                    runs.append((place, turn.first, last, turn.payload, turn.size))
            results += inbox.apply([place for place, turn in enumerate(received) if turn.first is not None])
        statuses = [index.status(target) for target in targets_of(streams)]
        seen.append((runs, [(where, comparable(applied)) for where, applied in results], statuses))
    assert seen[0] == seen[1] == seen[2]


def targets_of(streams: Sequence[object]) -> list[Target]:
    return [Target("w", rank, "m") for rank in range(len(streams))]


@contextmanager
def following(inbox: Inbox, index: Index, sockets: list[zmq.Socket[bytes]]) -> Iterator[dict[int, int]]:
    """Let an inbox follow sockets, each for its own target. Yields the sockets' places by file descriptor."""
    places: dict[int, int] = {}
    for place, (socket, target) in enumerate(zip(sockets, targets_of(sockets), strict=True)):
        index.add(target)
        places[inbox.follow(socket, target)] = place
    yield places
    for fd in places:
        inbox.leave(fd)


def inboxes() -> Iterator[tuple[Inbox, Index]]:
    python, native, without_libzmq = PythonIndex(), native_index(), native_index()
    with DefaultSelector() as others:
        yield PythonInbox(python, others.fileno()), python
        yield native_inbox(native, others.fileno()), native
        yield PythonInbox(without_libzmq, others.fileno()), without_libzmq


def native_index() -> Index:
    from indexer.native.index import NativeIndex

    return NativeIndex()


def native_inbox(index: Index, others: int) -> Inbox:
    inbox = make_inbox(index, others)
    assert isinstance(inbox, NativeInbox)
    return inbox


@contextmanager
def filled_sockets(*streams: list[list[bytes]]) -> Iterator[list[zmq.Socket[bytes]]]:
    """Yield sockets that have received the messages of one stream each."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context[zmq.Socket[bytes]]())
        sockets = [stack.enter_context(context.socket(zmq.PULL)) for _ in streams]
        for number, (socket, messages) in enumerate(zip(sockets, streams, strict=True)):
            sender = stack.enter_context(context.socket(zmq.PUSH))
            socket.set_hwm(0)
            sender.set_hwm(0)
            socket.bind(f"inproc://{number}")
            sender.connect(f"inproc://{number}")
            for parts in messages:
                sender.send_multipart(parts)
        yield sockets


def batch(*events: Event) -> bytes:
    return encode_batch(EventBatch(0.0, list(events)))


def test_turns_and_rounds_are_limited() -> None:
    small = [live_frames(b"", seq, batch()) for seq in range(100)]
    large = [live_frames(b"", seq, bytes(30_000)) for seq in range(10)]
    for inbox, index in inboxes():
        with filled_sockets(small, *[large] * 5) as sockets, following(inbox, index, sockets) as places:
            turns = inbox.read(0).received
            assert [(places[turn.socket], turn.messages) for turn in turns] == [(0, 64), (1, 3), (2, 3), (3, 3)]
            assert (turns[1].size, turns[1].largest) == (3 * 30_008, 30_008)
            turns = inbox.read(0).received
            assert [(places[turn.socket], turn.first) for turn in turns] == [(4, 0), (5, 0), (0, 64), (1, 3)]


def test_large_message_is_received_and_its_memory_returned() -> None:
    index = native_index()
    huge = [b"", encode_seq(0), bytes(12 << 20)]
    with (
        DefaultSelector() as others,
        filled_sockets([huge, live_frames(b"", 1, batch())]) as sockets,
        following(inbox := native_inbox(index, others.fileno()), index, sockets),
    ):
        (turn,) = inbox.read(0).received
        assert (turn.messages, turn.first, turn.largest) == (1, 0, (12 << 20) + 8)
        assert inbox.messages(0) == [huge]
        del turn
        give_back()
        before = resident_bytes()
        (turn,) = inbox.read(0).received
        assert turn.first == 1
        give_back()
        assert before - resident_bytes() > 10 << 20


@contextmanager
def steady_stream(index: Index) -> Iterator[tuple[Inbox, int]]:
    """Yield an inbox that receives expected batches all the time, and a pipe whose input is other work for it."""
    (out_of, into), stop = os.pipe(), threading.Event()
    (target,) = targets_of([0])
    index.add(target)

    def send() -> None:
        with context.socket(zmq.PUSH) as sender:
            sender.set_hwm(0)
            sender.connect("inproc://batches")
            seq = 0
            while not stop.wait(0.0002):
                sender.send_multipart(live_frames(b"", seq, batch()))
                seq += 1

    with (
        DefaultSelector() as others,
        zmq.Context[zmq.Socket[bytes]]() as context,
        context.socket(zmq.PULL) as socket,
    ):
        others.register(out_of, EVENT_READ)
        socket.set_hwm(0)
        socket.bind("inproc://batches")
        sending = threading.Thread(target=send)
        sending.start()
        inbox = native_inbox(index, others.fileno())
        inbox.expect(inbox.follow(socket, target), 0, 10**6)
        try:
            yield inbox, into
        finally:
            stop.set()
            sending.join()
            os.close(into)
            os.close(out_of)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_expected_rounds_repeat_until_another_event_or_timeout() -> None:
    index = native_index()
    with steady_stream(index) as (inbox, other_input):
        deadline, last, longest = time.monotonic() + DEADLINE_S, -1, 0
        while longest <= 64:  # maximum number of messages in a round
            assert time.monotonic() < deadline
            for turn in inbox.read(0.1).batches:
                assert turn.first == last + 1
                last = turn.last
                longest = max(longest, turn.last - turn.first)
        os.write(other_input, b".")
        begun = time.monotonic()
        for _ in range(3):
            inbox.read(DEADLINE_S)
        assert time.monotonic() - begun < DEADLINE_S


def test_busy_streams_are_reported_periodically_and_on_request() -> None:
    with steady_stream(native_index()) as (inbox, _):
        deadline, last, rested = time.monotonic() + DEADLINE_S, -1, 0
        while rested < 2:
            assert time.monotonic() < deadline
            reading = inbox.read(0.1)
            for turn in [*reading.batches, *(rest := inbox.rest() if reading.unreported else [])]:
                assert turn.first == last + 1
                last = turn.last
            assert bool(rest) == reading.unreported
            assert inbox.rest() == []
            rested += bool(rest)
        while not (batches := inbox.read(0.1).batches):  # reported without `rest`
            assert time.monotonic() < deadline
        assert batches[0].first == last + 1


def test_reading_reports_a_batch_only_after_a_pause() -> None:
    index = native_index()
    with (
        DefaultSelector() as others,
        filled_sockets([live_frames(b"", 0, batch())]) as sockets,
        following(inbox := native_inbox(index, others.fileno()), index, sockets) as (fd,),
    ):
        inbox.expect(fd, 0, 10**6)
        (turn,) = inbox.read(DEADLINE_S).batches
        assert 0.004 < time.time() - turn.received_at < DEADLINE_S


@pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies are set on Linux only")
def test_busy_reader_lowers_its_scheduling_priority() -> None:
    """ZeroMQ's thread and the receiving thread interrupt no others until Python's lock is needed."""
    before, receiver = io_threads(), threading.get_native_id()
    with steady_stream(native_index()) as (inbox, other_input):

        def policies_while_reading() -> set[int]:
            threads = receiver, *(io_threads() - before)

            def observe() -> set[int]:
                time.sleep(0.02)  # until `read` has begun
                return {*map(os.sched_getscheduler, threads)}

            with ThreadPoolExecutor(1) as other:
                observed = other.submit(observe)
                inbox.read(0.2)
            assert os.sched_getscheduler(0) == os.SCHED_OTHER
            return observed.result()

        assert policies_while_reading() == {os.SCHED_OTHER}
        deadline = time.monotonic() + DEADLINE_S
        while policies_while_reading() != {os.SCHED_BATCH}:
            assert time.monotonic() < deadline
        os.write(other_input, b".")  # each `read` ends at once, with few batches
        while policies_while_reading() != {os.SCHED_OTHER}:
            assert time.monotonic() < deadline


def io_threads() -> set[int]:
    """Return the ids of ZeroMQ's I/O threads."""
    threads = set()
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            if "ZMQbg/IO" in (task / "comm").read_text():
                threads.add(int(task.name))
    return threads


def test_expected_batches_of_a_dropped_target_are_not_applied() -> None:
    """Another target with the same number does not get the batches either."""
    index, (old, new) = native_index(), targets_of([0, 0])
    stored = batch(BlockStored([1], None, [7], 1))
    with (
        DefaultSelector() as others,
        filled_sockets([live_frames(b"", 0, stored)], [live_frames(b"", 0, stored)]) as (socket, other),
        following(inbox := native_inbox(index, others.fileno()), index, [socket]) as (fd,),
    ):
        inbox.expect(fd, 0, 10**6)
        index.drop(old)
        index.add(new)
        assert [turn.last for turn in inbox.read(0).batches] == [0]
        new_fd = inbox.follow(other, new)
        status = index.status(new)
        assert status is not None
        assert not any(status.blocks.values())
        inbox.expect(new_fd, 0, 10**6)
        assert [turn.last for turn in inbox.read(0).batches] == [0]
        status = index.status(new)
        assert status is not None
        assert sum(status.blocks.values()) == 1


def test_python_inbox_is_used_without_libzmq_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(_name: str) -> NoReturn:
        raise OSError("cannot open shared object file")

    index = native_index()
    with DefaultSelector() as others:
        native_inbox(index, others.fileno())
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", no_library)
            assert isinstance(make_inbox(index, others.fileno()), PythonInbox)
        with monkeypatch.context() as patch:
            patch.setattr(ctypes, "CDLL", lambda _name: ctypes.PyDLL(None))  # a library without the functions of libzmq
            assert isinstance(make_inbox(index, others.fileno()), PythonInbox)
