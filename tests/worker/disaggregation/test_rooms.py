"""A room's state only advances, and never leaves a terminal one."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.disaggregation import KVPoll, group_state
from worker.disaggregation.rooms import Room

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
