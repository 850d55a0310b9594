"""Conversion of pages to runs and of runs to byte ranges, in numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Addresses = NDArray[np.uint64]


class Ranges(NamedTuple):
    """Byte ranges: two arrays of one length."""

    pointers: Addresses
    lengths: Addresses


class Writes(NamedTuple):
    """Copies of `lengths` bytes from our addresses to the peer's: three arrays of one length."""

    sources: Addresses
    destinations: Addresses
    lengths: Addresses

    @property
    def size(self) -> int:
        """The total number of bytes."""
        return int(self.lengths.sum())


class PageRuns(NamedTuple):
    """Pages that are contiguous on both sides: first source page, first destination page, and count of each run."""

    sources: NDArray[np.int64]
    destinations: NDArray[np.int64]
    counts: NDArray[np.int64]


def group_runs(src_pages: ArrayLike, dst_pages: ArrayLike) -> PageRuns:
    """Merge pages that follow each other in both arrays. Raises ValueError for empty or unequal arrays."""
    sources, destinations = page_array(src_pages, "src_pages"), page_array(dst_pages, "dst_pages")
    if len(sources) != len(destinations):
        raise ValueError(
            f"src_pages has {len(sources)} pages and dst_pages {len(destinations)}: give each source a destination"
        )
    if not len(sources):
        raise ValueError("src_pages and dst_pages are empty: a chunk without pages needs no transfer")
    breaks = np.flatnonzero((sources[1:] - sources[:-1] != 1) | (destinations[1:] - destinations[:-1] != 1)) + 1
    starts = np.concatenate(([0], breaks))
    return PageRuns(sources[starts], destinations[starts], np.diff(starts, append=len(sources)))


def page_writes(
    runs: PageRuns, sources: Sequence[int], destinations: Sequence[int], item_lengths: Sequence[int]
) -> Writes:
    """Return the copies of the runs of pages in every buffer (layer). Raises ValueError for unequal buffers."""
    if not len(sources) == len(destinations) == len(item_lengths):
        raise ValueError(
            f"{len(sources)} source buffers, {len(destinations)} destination buffers and {len(item_lengths)} item "
            "lengths: both sides need the same buffers"
        )
    items = np.asarray(item_lengths, np.uint64)[:, None]
    return Writes(
        (np.asarray(sources, np.uint64)[:, None] + items * runs.sources.astype(np.uint64)).ravel(),
        (np.asarray(destinations, np.uint64)[:, None] + items * runs.destinations.astype(np.uint64)).ravel(),
        (items * runs.counts.astype(np.uint64)).ravel(),
    )


def page_ranges(pages: ArrayLike, pointers: Sequence[int], item_lengths: Sequence[int]) -> Ranges:
    """Return the bytes of pages, in any order, in every buffer. Raises ValueError for unequal buffers."""
    wanted = np.sort(page_array(pages, "pages"))
    if not len(wanted):
        return Ranges(np.empty(0, np.uint64), np.empty(0, np.uint64))
    runs = group_runs(wanted, wanted)
    _, destinations, lengths = page_writes(runs, pointers, pointers, item_lengths)
    return Ranges(destinations, lengths)


def join_ranges(*parts: Ranges) -> Ranges:
    """Return all ranges of the parts."""
    return Ranges(np.concatenate([part.pointers for part in parts]), np.concatenate([part.lengths for part in parts]))


def join_writes(*parts: Writes) -> Writes:
    """Return all writes of the parts, in their order."""
    return Writes(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


def page_array(pages: ArrayLike, name: str) -> NDArray[np.int64]:
    """Return page indices as a flat int64 array. Raises ValueError, with `name`, for others or a negative page."""
    array = np.asarray(pages)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be a flat array of page indices, not {array.dtype} of shape {array.shape}")
    array = array.astype(np.int64, copy=False)
    if array.size and array.min() < 0:
        raise ValueError(f"{name} has page {array.min()}: page indices start at 0")
    return array


def split_writes(writes: Writes, most_runs: int, most_bytes: int) -> Iterator[Writes]:
    """Split copies into portions of at most `most_runs` and `most_bytes`. Longer runs are cut, empty ones dropped."""
    kept = writes.lengths > 0
    sources, destinations, lengths = (array[kept] for array in writes)
    pieces = (lengths + np.uint64(most_bytes - 1)) // np.uint64(most_bytes)
    if (pieces > 1).any():
        counts = pieces.astype(np.int64)
        place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        offsets = place.astype(np.uint64) * np.uint64(most_bytes)
        sources, destinations, lengths = (np.repeat(array, counts) for array in (sources, destinations, lengths))
        sources, destinations = sources + offsets, destinations + offsets
        lengths = np.minimum(lengths - offsets, np.uint64(most_bytes))
    ends = np.cumsum(lengths)
    start, before = 0, 0
    while start < len(lengths):
        fitting = int(np.searchsorted(ends, np.uint64(before + most_bytes), side="right"))
        stop = min(fitting, start + most_runs)
        yield Writes(sources[start:stop], destinations[start:stop], lengths[start:stop])
        start, before = stop, int(ends[stop - 1])
