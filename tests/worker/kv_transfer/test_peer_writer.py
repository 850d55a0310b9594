"""Rooms and the queues to decode ranks."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.kv_transfer import KVPoll, group_state
from worker.kv_transfer.frames import RoomRequest
from worker.kv_transfer.layout import KVArgs, Layout, layout_of
from worker.kv_transfer.ranks import Rank, Topology
from worker.kv_transfer.rooms import Room
from worker.kv_transfer.sending import Destination, PeerWriter, WriteTask
from worker.kv_transfer.transfer import GrantKey, PeerLostError, TransferEngine, Writes, open_engine

NOTHING = Writes(*(np.empty(0, np.uint64) for _ in range(3)))


def layout() -> Layout:
    args = KVArgs(kv_data_ptrs=[0, 64], kv_data_lens=[64, 64], kv_item_lens=[8, 8], page_size=2, kv_cache_dtype="int8")
    return layout_of(args, Topology(), Rank())


def request() -> RoomRequest:
    return RoomRequest(
        sender="a",
        to="b",
        reply_to="tcp://127.0.0.1:1",
        room=1,
        generation=2,
        pages=b"",
        prefix_pages=0,
        aux_index=None,
        dummy=False,
        destinations=1,
        time_left=5.0,
    )


class Log:
    """The ends of tasks in order: the number, and the reason of a failure."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, str]] = []
        self.ended = threading.Semaphore(0)

    def task(self, number: int, destination: Destination) -> WriteTask:
        def plan() -> Writes:
            raise PeerLostError(f"planned {number}")

        def finished(error: str) -> None:
            destination.end()
            self.ends.append((number, error))
            self.ended.release()

        return WriteTask(GrantKey(1, 2), time.monotonic() + 60, destination.begin, plan, finished)


def test_no_write_begins_for_failed_room() -> None:
    """The pages of a failed room may be reused by then."""
    engine: TransferEngine = open_engine("tcp")
    writer = PeerWriter(engine, "tcp://127.0.0.1:1", layout(), b"")
    room, log = Room(1, 0, time.monotonic() + 60), Log()
    destination = Destination(room, request(), writer)
    assert writer.submit(log.task(1, destination))
    assert log.ended.acquire(timeout=60)
    assert not destination.writing
    room.fail("aborted")
    assert writer.submit(log.task(2, destination))
    assert log.ended.acquire(timeout=60)
    assert log.ends == [(1, "the transfer failed: planned 1"), (2, "the room had failed before")]
    writer.stop()
    writer.join()
    assert not writer.alive
    engine.close()


def test_queued_writes_fail_when_peer_is_dropped() -> None:
    engine: TransferEngine = open_engine("tcp")
    other: TransferEngine = open_engine("tcp")
    writer = PeerWriter(engine, "tcp://127.0.0.1:1", layout(), other.address())
    log = Log()
    destination = Destination(Room(1, 0, time.monotonic() + 60), request(), writer)
    planned, go_on = threading.Event(), threading.Event()

    def plan() -> Writes:
        planned.set()
        assert go_on.wait(60)
        return NOTHING

    first = log.task(1, destination)
    writer.submit(WriteTask(first.key, first.deadline, first.begin, plan, first.finished))
    writer.submit(log.task(2, destination))
    assert planned.wait(60)
    assert destination.writing
    writer.stop()
    go_on.set()
    writer.join()
    assert [number for number, _ in log.ends] == [1, 2]
    assert all(error for _, error in log.ends)
    engine.close()
    other.close()


steps = st.lists(st.one_of(st.sampled_from(KVPoll), st.text(min_size=1, max_size=5)), max_size=12)


@given(steps)
def test_room_only_advances_until_terminal(news: list[KVPoll | str]) -> None:
    """A text is a failure with that reason."""
    room = Room(1, 2, 3.0)
    assert room.state is KVPoll.Bootstrapping
    for step in news:
        before, reason = room.state, room.reason
        if isinstance(step, KVPoll):
            moved = room.advance(step)
            assert moved == (room.state is not before)
            assert room.state >= before
            assert room.state is (before if before is KVPoll.Failed else max(before, step))
        else:
            failed = room.fail(step)
            assert failed == (before not in (KVPoll.Failed, KVPoll.Success))
            assert room.reason == (step if failed else reason)
        if before in (KVPoll.Failed, KVPoll.Success):
            assert room.state is before


def test_group_state_is_slowest_rank_and_fails_with_any() -> None:
    assert group_state([KVPoll.Success, KVPoll.Transferring]) is KVPoll.Transferring
    assert group_state([KVPoll.Success, KVPoll.Failed, KVPoll.Bootstrapping]) is KVPoll.Failed
    assert group_state([KVPoll.Success] * 3) is KVPoll.Success
    with pytest.raises(ValueError, match="empty"):
        group_state([])


def test_wait_ends_with_room_or_timeout() -> None:
    room = Room(1, 2, 3.0)
    assert room.wait(0.01) is KVPoll.Bootstrapping
    threading.Timer(0.05, lambda: room.fail("gone")).start()
    start = time.monotonic()
    assert room.wait(60) is KVPoll.Failed
    assert time.monotonic() - start < 50
    assert not room.wait_quiet(0.01)
    threading.Timer(0.05, room.set_quiet).start()
    assert room.wait_quiet(10)
