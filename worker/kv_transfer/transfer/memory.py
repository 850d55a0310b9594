"""Memory of this process and of a mapped peer, and copies between them."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from worker.kv_transfer.transfer.runs import Addresses, Ranges, Writes

Bytes = NDArray[np.uint8]


class Spans:
    """Disjoint byte ranges in ascending order. With `merge`, adjacent ranges are joined."""

    def __init__(self, ranges: Ranges, *, merge: bool = True) -> None:
        """Sort the ranges. Raises ValueError beyond the address space, and without `merge` for overlapping ones."""
        order = np.argsort(ranges.pointers, kind="stable")
        starts, lengths = ranges.pointers[order], ranges.lengths[order]
        if (lengths > ~starts).any():
            raise ValueError("a range ends beyond the address space")
        ends = np.maximum.accumulate(starts + lengths) if len(starts) else starts
        if merge and len(starts):
            first = np.concatenate(([True], starts[1:] > ends[:-1]))
            starts, ends = starts[first], ends[np.concatenate((np.flatnonzero(first)[1:] - 1, [-1]))]
        elif (starts[1:] < ends[:-1]).any():
            raise ValueError("ranges overlap")
        self.starts, self.ends = starts, ends

    def find(self, pointers: Addresses, lengths: Addresses) -> NDArray[np.int64]:
        """Return for each range the span that contains it. Raises ValueError if a range is not within one span."""
        if not len(self.starts) and len(pointers):
            raise ValueError("no range is registered")
        found = np.searchsorted(self.starts, pointers, side="right") - 1
        ends = self.ends[found]
        within = (found >= 0) & (pointers <= ends) & (lengths <= ends - pointers)
        if not within.all():
            bad = int(np.argmin(within))
            raise ValueError(f"{lengths[bad]} bytes at {int(pointers[bad]):#x} are outside")
        return found


class Memory:
    """Arrays of bytes by their owner's address: of this process, or of a peer that shares its memory."""

    def __init__(self) -> None:
        self._arrays: dict[int, Bytes] = {}
        self._place()

    def add(self, arrays: Iterable[tuple[int, Bytes]]) -> None:
        """Add arrays with their addresses. Raises ValueError, and adds none, if one is empty or overlaps another."""
        before = self._arrays
        after = dict(before)
        for pointer, array in arrays:
            if not array.size:
                raise ValueError(f"the region at {pointer:#x} is empty")
            if pointer in after:
                raise ValueError(f"the region at {pointer:#x} is already registered")
            after[pointer] = array
        self._arrays = after
        try:
            self._place()
        except ValueError as error:
            self._arrays = before
            self._place()
            raise ValueError(f"memory can't be registered: {error}") from None

    def check(self, ranges: Ranges) -> None:
        """Check ranges. Raises ValueError for one that is not registered."""
        self._spans.find(*ranges)

    def addresses(self, pointers: Addresses, lengths: Addresses) -> Addresses:
        """Return the addresses of ranges in this process. Raises ValueError for one that is not registered."""
        found = self._spans.find(pointers, lengths)
        return self._bases[found] + (pointers - self._spans.starts[found])

    def views(self, pointers: Addresses, lengths: Addresses, *, merge: bool = True) -> list[memoryview]:
        """Return buffers of the ranges in order, merged if adjacent. Raises ValueError for an unregistered range."""
        spans, views = self._spans, self._views
        found = spans.find(pointers, lengths)
        begins = pointers - spans.starts[found]
        ends = begins + lengths
        follows = (begins[1:] == ends[:-1]) & (found[1:] == found[:-1]) & merge
        first, last = np.concatenate(([True], ~follows)), np.concatenate((~follows, [True]))
        return [
            views[index][begin:end]
            for index, begin, end in zip(
                found[first].tolist(), begins[first].tolist(), ends[last].tolist(), strict=True
            )
        ]

    def _place(self) -> None:
        pointers = sorted(self._arrays)
        self._ordered = [self._arrays[pointer] for pointer in pointers]
        self._views = [array.data for array in self._ordered]
        self._bases = np.array([array.ctypes.data for array in self._ordered], np.uint64)
        lengths = np.array([array.size for array in self._ordered], np.uint64)
        self._spans = Spans(Ranges(np.array(pointers, np.uint64), lengths), merge=False)


def array_at(pointer: int, length: int) -> Bytes:
    """Return the bytes at an address of this process, which must stay mapped while the array is used."""
    array: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(pointer))
    return array


def new_array(length: int) -> Bytes:
    """Return zeroed bytes that begin at a page."""
    return np.frombuffer(mmap.mmap(-1, length), np.uint8)


_SMALL = 1 << 14  # bytes; above, one Python step for each run is cheaper than copying it twice
_LARGE = 1 << 16  # bytes; up to here a copy is faster than releasing and reacquiring the interpreter lock
_AT_ONCE = 1 << 19  # bytes of small runs that are copied at once, so that they stay in the processor's cache


def copy_runs(writes: Writes, sources: Memory, destinations: Memory) -> None:
    """Copy all runs. Raises ValueError, before the first copy, if one is outside of its memory."""
    reading = sources.addresses(writes.sources, writes.lengths)
    writing = destinations.addresses(writes.destinations, writes.lengths)
    small = writes.lengths <= _SMALL
    for length in np.unique(writes.lengths[small]).tolist():
        alike = writes.lengths == length
        _copy_alike(reading[alike], writing[alike], length)
    if small.all():
        return
    lengths = writes.lengths[~small]
    readable = sources.views(writes.sources[~small], lengths, merge=False)
    writable = destinations.views(writes.destinations[~small], lengths, merge=False)
    for source, destination in zip(readable, writable, strict=True):
        if len(source) <= _LARGE:
            destination[:] = source
        else:
            np.copyto(np.asarray(destination), np.asarray(source))


def _copy_alike(sources: Addresses, destinations: Addresses, length: int) -> None:
    reading, writing = _windows(sources, length), _windows(destinations, length)
    from_rows, to_rows = sources - sources.min(), destinations - destinations.min()
    step = max(1, _AT_ONCE // length)
    for start in range(0, len(sources), step):
        writing[to_rows[start : start + step]] = reading[from_rows[start : start + step]]


def _windows(addresses: Addresses, length: int) -> Bytes:
    """Return a row of `length` bytes for every address from the lowest to the highest, mapped or not."""
    lowest, highest = int(addresses.min()), int(addresses.max())
    interface = {
        "data": (lowest, False),
        "shape": (highest - lowest + 1, length),
        "strides": (1, 1),
        "typestr": "|u1",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
