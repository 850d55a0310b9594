"""Only granted bytes can be written, and a revoked grant is quiescent exactly when no write is landing."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.disaggregation.transfer import GrantKey, Quiescence, Ranges, RefusedError
from worker.disaggregation.transfer.grants import Grant, Grants
from worker.disaggregation.transfer.memory import Memory, Spans, array_at, new_array

_KEY = GrantKey(7, 1)
_LARGEST = (1 << 64) - 1


def _ranges(*ranges: tuple[int, int]) -> Ranges:
    columns = np.array(ranges, np.uint64).reshape(-1, 2)
    return Ranges(columns[:, 0].copy(), columns[:, 1].copy())


_some = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=8)


@given(_some, _some)
def test_write_is_allowed_if_all_bytes_are_granted(
    granted: list[tuple[int, int]], written: list[tuple[int, int]]
) -> None:
    grant = Grant(_KEY, _ranges(*granted))
    allowed = {pointer + i for pointer, length in granted for i in range(length)}
    for pointer, length in written:
        if all(pointer + i in allowed for i in range(length)):
            grant.check(*_ranges((pointer, length)))
        else:
            with pytest.raises(RefusedError, match="room 7, generation 1, may not write there"):
                grant.check(*_ranges((pointer, length)))


@pytest.mark.parametrize("write", [(0, 1), (99, 2), (100, 11), (109, _LARGEST), (_LARGEST, 1), (_LARGEST, _LARGEST)])
def test_write_beyond_address_space_is_refused(write: tuple[int, int]) -> None:
    with pytest.raises(RefusedError):
        Grant(_KEY, _ranges((100, 10))).check(*_ranges(write))


def test_write_without_grant_is_refused() -> None:
    with pytest.raises(RefusedError):
        Grant(_KEY, _ranges()).check(*_ranges((0, 1)))


@given(st.lists(st.sampled_from(["enter", "leave", "revoke"]), max_size=30))
def test_revoked_grant_is_quiescent_without_landing_writes(steps: list[str]) -> None:
    grant = Grant(_KEY, _ranges((0, 1)))
    inside, revoked = 0, False
    for step in steps:
        if step == "enter" and revoked:
            with pytest.raises(RefusedError, match="revoked"):
                grant.enter()
        elif step == "enter":
            grant.enter()
            inside += 1
        elif step == "leave" and inside:
            grant.leave()
            inside -= 1
        elif step == "revoke":
            revoked = True
            assert (grant.revoke(time.monotonic()) is Quiescence.QUIESCENT) == (inside == 0)


def test_revoke_waits_for_landing_writes() -> None:
    grant = Grant(_KEY, _ranges((0, 1)))
    grant.enter()
    answers: list[Quiescence] = []
    thread = threading.Thread(target=lambda: answers.append(grant.revoke(time.monotonic() + 30)))
    thread.start()
    while True:  # until it has begun
        try:
            grant.enter()
            grant.leave()
        except RefusedError:
            break
    assert not answers
    grant.leave()
    thread.join(60)
    assert answers == [Quiescence.QUIESCENT]


def test_key_is_reusable_after_quiescence() -> None:
    memory = new_array(4096)
    pointer = memory.ctypes.data
    known = Memory()
    known.add([(pointer, memory)])
    grants = Grants(known)
    wanted = _ranges((pointer, 10))
    grants.add(_KEY, wanted)
    with pytest.raises(ValueError, match="room 7, generation 1, already has a grant"):
        grants.add(_KEY, wanted)
    grant = grants.find(_KEY, *wanted)
    grant.enter()
    assert grants.revoke(_KEY, time.monotonic()) is Quiescence.UNKNOWN
    with pytest.raises(ValueError, match="has a grant"):
        grants.add(_KEY, wanted)
    grant.leave()
    assert grants.revoke(_KEY, time.monotonic()) is Quiescence.QUIESCENT
    with pytest.raises(RefusedError, match="has no grant"):
        grants.find(_KEY, *wanted)
    grants.add(_KEY, wanted)
    assert grants.revoke(GrantKey(8, 1), time.monotonic()) is Quiescence.QUIESCENT


@pytest.mark.parametrize(
    ("key", "ranges", "message"),
    [
        (_KEY, _ranges((0, 10)), "are outside"),
        (GrantKey(-1, 0), _ranges(), "room and generation"),
        (GrantKey(0, 1 << 63), _ranges(), "room and generation"),
    ],
)
def test_invalid_grants_are_rejected(key: GrantKey, ranges: Ranges, message: str) -> None:
    known = Memory()
    memory = new_array(4096)
    known.add([(memory.ctypes.data, memory)])
    with pytest.raises(ValueError, match=message):
        Grants(known).add(key, ranges)


def test_adjacent_regions_share_grant_but_not_writes() -> None:
    memory = new_array(8192)
    pointer = memory.ctypes.data
    known = Memory()
    known.add([(pointer, memory[:4096]), (pointer + 4096, memory[4096:])])
    grants = Grants(known)
    grants.add(_KEY, _ranges((pointer, 4096), (pointer + 4096, 4096)))
    grants.find(_KEY, *_ranges((pointer + 4000, 96)))
    with pytest.raises(RefusedError, match="of one region"):
        grants.find(_KEY, *_ranges((pointer + 4000, 97)))


def test_overlapping_regions_are_rejected() -> None:
    memory = new_array(8192)
    pointer = memory.ctypes.data
    known = Memory()
    known.add([(pointer, memory[:4096])])
    for start, end in ((0, 4096), (4095, 8192)):
        with pytest.raises(ValueError, match="registered"):
            known.add([(pointer + start, memory[start:end])])
    with pytest.raises(ValueError, match="is empty"):
        known.add([(pointer + 4096, memory[4096:4096])])
    known.check(_ranges((pointer, 4096)))
    with pytest.raises(ValueError, match="are outside"):
        known.check(_ranges((pointer + 4096, 1)))


def test_views_have_bytes_and_adjacent_views_are_merged() -> None:
    memory = new_array(4096)
    pointer = memory.ctypes.data
    known = Memory()
    known.add([(pointer, array_at(pointer, 4096))])
    views = known.views(*_ranges((pointer + 10, 5), (pointer + 15, 5), (pointer, 2)))
    assert [len(view) for view in views] == [10, 2]
    views[0][:] = b"0123456789"
    assert memory[10:20].tobytes() == b"0123456789"
    assert len(known.views(*_ranges((pointer, 5), (pointer + 5, 5)), merge=False)) == 2


def test_spans_beyond_address_space_are_rejected() -> None:
    with pytest.raises(ValueError, match="beyond the address space"):
        Spans(_ranges((_LARGEST, 2)))
