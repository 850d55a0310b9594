"""Pages into runs, runs into ranges, ranges into portions: each beside the obvious way to do it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.kv_transfer.transfer import (
    GrantKey,
    PageRuns,
    Quiescence,
    Ranges,
    RefusedError,
    Writes,
    group_runs,
    page_ranges,
    page_writes,
)
from worker.kv_transfer.transfer.grants import Grant, Grants
from worker.kv_transfer.transfer.memory import Memory, Spans, array_at, new_array
from worker.kv_transfer.transfer.runs import split_writes

_pages = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=40)


def _pairs(runs: PageRuns) -> list[tuple[int, int]]:
    return [
        (source + step, destination + step)
        for source, destination, count in zip(*(column.tolist() for column in runs), strict=True)
        for step in range(count)
    ]


@given(_pages)
def test_runs_have_all_pages_in_order_and_are_maximal(pairs: list[tuple[int, int]]) -> None:
    sources, destinations = zip(*pairs, strict=True)
    runs = group_runs(sources, destinations)
    assert _pairs(runs) == pairs
    ends = [(source + count, destination + count) for source, destination, count in zip(*runs, strict=True)]
    starts = list(zip(runs.sources, runs.destinations, strict=True))
    assert all(end != start for end, start in zip(ends, starts[1:], strict=False))


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        ([], [], "empty"),
        ([1, 2], [1], "src_pages has 2 pages and dst_pages 1"),
        ([[1]], [[1]], "src_pages must be a flat array"),
        ([0.5], [1], "src_pages must be a flat array"),
        ([1], [-1], "dst_pages has page -1"),
    ],
)
def test_invalid_pages_cannot_be_grouped(sources: list[int], destinations: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_runs(sources, destinations)


def test_page_writes_cover_every_buffer() -> None:
    writes = page_writes(group_runs([4, 5, 9], [1, 2, 0]), [1000, 2000], [5000, 6000], [10, 20])
    assert writes.sources.tolist() == [1040, 1090, 2080, 2180]
    assert writes.destinations.tolist() == [5010, 5000, 6020, 6000]
    assert writes.lengths.tolist() == [20, 10, 40, 20]
    assert writes.size == 90
    with pytest.raises(ValueError, match="2 source buffers, 1 destination buffers"):
        page_writes(group_runs([1], [1]), [1, 2], [1], [1, 1])


def test_page_ranges_accept_any_order() -> None:
    ranges = page_ranges([7, 2, 3], [1000], [10])
    assert list(zip(*(column.tolist() for column in ranges), strict=True)) == [(1020, 20), (1070, 10)]
    assert [len(column) for column in page_ranges([], [1000], [10])] == [0, 0]


@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(0, 500), st.integers(0, 70)), max_size=20),
    st.integers(1, 5),
    st.integers(1, 40),
)
def test_portions_are_limited_and_cover_everything(
    copies: list[tuple[int, int, int]], most_runs: int, most_bytes: int
) -> None:
    columns = np.array(copies, np.uint64).reshape(-1, 3).T
    portions = list(split_writes(Writes(*columns), most_runs, most_bytes))
    for portion in portions:
        assert 0 < len(portion.lengths) <= most_runs
        assert 0 < portion.size <= most_bytes

    def every_byte(writes: Writes) -> list[tuple[int, int]]:
        rows = zip(*(column.tolist() for column in writes), strict=True)
        return [(source + i, destination + i) for source, destination, length in rows for i in range(length)]

    assert [byte for portion in portions for byte in every_byte(portion)] == every_byte(Writes(*columns))


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
    thread = threading.Thread(target=lambda: answers.append(grant.revoke(time.monotonic() + 60)))
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
