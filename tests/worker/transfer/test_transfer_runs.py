"""Pages into runs, runs into ranges, ranges into portions: each beside the obvious way to do it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.disaggregation.transfer import PageRuns, Writes, group_runs, page_ranges, page_writes
from worker.disaggregation.transfer.runs import split_writes

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
