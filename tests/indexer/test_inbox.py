"""What comes live is received and applied alike by Python, by the native core, and by that without libzmq."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cores import payload, said

from indexer import Index, Target
from indexer.cores import CORES
from indexer.factory import make_inbox
from indexer.inbox import Inbox, PythonInbox
from indexer.memory import give_back
from indexer.python_index import PythonIndex
from kvevents import Event, EventBatch, encode_batch
from kvevents.frames import encode_seq, live_frames

pytestmark = pytest.mark.skipif("native" not in CORES, reason="the native core is not built")


@st.composite
def live_messages(draw: st.DrawFn) -> list[list[bytes]]:
    """Of one stream: most follow one another and are batches."""
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


@settings(max_examples=60, deadline=None)
@given(st.lists(live_messages(), min_size=1, max_size=3))
def test_what_is_received_by_both_is_the_same_and_is_applied_alike(streams: list[list[list[bytes]]]) -> None:
    """By the core in Python, by the native one, and by that where libzmq cannot be called."""
    targets = [Target("w", rank, "m") for rank in range(len(streams))]
    seen = []
    for inbox, index in inboxes():
        for target in targets:
            index.add(target)
        with pulling(*streams) as sockets:
            received = inbox.receive(sockets)
        runs = [(place, targets[place]) for place, turn in enumerate(received) if turn.first is not None]
        told = [(where, said(applied)) for where, applied in inbox.apply(runs)]
        messages = [inbox.messages(place) for place in range(len(received))]
        seen.append((received, told, [index.status(target) for target in targets]))
        assert [(turn.drained, turn.messages) for turn in received] == [(True, len(each)) for each in streams]
        assert messages == streams
    assert seen[0] == seen[1] == seen[2]


def inboxes() -> Iterator[tuple[Inbox, Index]]:
    python, native, without_libzmq = PythonIndex(), native_index(), native_index()
    yield PythonInbox(python), python
    yield native_inbox(native), native
    yield PythonInbox(without_libzmq), without_libzmq


def native_index() -> Index:
    from indexer.native_index import NativeIndex

    return NativeIndex()


def native_inbox(index: Index) -> Inbox:
    from indexer.native_inbox import NativeInbox

    inbox = make_inbox(index)
    assert isinstance(inbox, NativeInbox)
    return inbox


@contextmanager
def pulling(*streams: list[list[bytes]]) -> Iterator[list[zmq.Socket[bytes]]]:
    """Sockets to which messages came."""
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


def test_a_socket_has_its_turn_and_a_round_its_end() -> None:
    small = [live_frames(b"", seq, batch()) for seq in range(100)]
    large = [live_frames(b"", seq, bytes(30_000)) for seq in range(10)]
    for inbox, _ in inboxes():
        with pulling(small, *[large] * 5) as sockets:
            turns = inbox.receive(sockets)
            assert [(turn.drained, turn.messages) for turn in turns] == [(False, 64)] + [(False, 3)] * 3
            assert (turns[1].size, turns[1].largest) == (3 * 30_008, 30_008)
            assert [turn.first for turn in inbox.receive([*sockets[4:], *sockets[:3]])] == [0, 0, 64, 3]


def test_a_message_of_many_megabytes_is_received_whole_and_what_it_took_is_given_back() -> None:
    inbox = native_inbox(native_index())
    huge = [b"", encode_seq(0), bytes(12 << 20)]
    with pulling([huge, live_frames(b"", 1, batch())]) as sockets:
        (turn,) = inbox.receive(sockets)
        assert (turn.drained, turn.messages, turn.first, turn.largest) == (False, 1, 0, (12 << 20) + 8)
        assert inbox.messages(0) == [huge]
        give_back()
        before = resident_bytes()
        (turn,) = inbox.receive(sockets)
        assert (turn.drained, turn.first) == (True, 1)
        give_back()
        assert before - resident_bytes() > 10 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_where_libzmq_cannot_be_called_pyzmq_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    index = native_index()
    native_inbox(index)

    def no_library(_name: str) -> NoReturn:
        raise OSError("cannot open shared object file")

    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", no_library)
        assert isinstance(make_inbox(index), PythonInbox)
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "CDLL", lambda _name: ctypes.PyDLL(None))  # one that has other functions
        assert isinstance(make_inbox(index), PythonInbox)
