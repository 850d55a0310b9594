"""Registered memory: which bytes an address and a length mean, and whether they may be touched at all."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from worker.disaggregation.transfer.runs import Addresses, Ranges

Bytes = NDArray[np.uint8]


class Spans:
    """Disjoint byte ranges in ascending order; neighbours that touch are one, unless told otherwise."""

    def __init__(self, ranges: Ranges, *, merge: bool = True) -> None:
        """Raises ValueError for ranges beyond the address space, and for ranges that overlap if they aren't merged."""
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
        """For each range the span that holds it whole. Raises ValueError when one is not within a single span."""
        if not len(self.starts) and len(pointers):
            raise ValueError("there is no range at all")
        found = np.searchsorted(self.starts, pointers, side="right") - 1
        ends = self.ends[found]
        within = (found >= 0) & (pointers <= ends) & (lengths <= ends - pointers)
        if not within.all():
            bad = int(np.argmin(within))
            raise ValueError(f"{lengths[bad]} bytes at {int(pointers[bad]):#x} are outside")
        return found


class Memory:
    """Arrays of bytes, each found by the address its owner knows it by: ours, or that of a peer that shares it."""

    def __init__(self) -> None:
        self._arrays: dict[int, Bytes] = {}
        self._place()

    def add(self, arrays: Iterable[tuple[int, Bytes]]) -> None:
        """Arrays and their addresses. Raises ValueError, and adds nothing, when one is empty or overlaps another."""
        before = self._arrays
        after = dict(before)
        for pointer, array in arrays:
            if not array.size:
                raise ValueError(f"the region at {pointer:#x} is empty")
            if pointer in after:
                raise ValueError(f"the region at {pointer:#x} is registered already")
            after[pointer] = array
        self._arrays = after
        try:
            self._place()
        except ValueError as error:
            self._arrays = before
            self._place()
            raise ValueError(f"memory can't be registered: {error}") from None

    def check(self, ranges: Ranges) -> None:
        """Raises ValueError for a range that isn't registered."""
        self._spans.find(*ranges)

    def addresses(self, pointers: Addresses, lengths: Addresses) -> Addresses:
        """Where these ranges are in this process. Raises ValueError for one not registered."""
        found = self._spans.find(pointers, lengths)
        return self._bases[found] + (pointers - self._spans.starts[found])

    def views(self, pointers: Addresses, lengths: Addresses, *, merge: bool = True) -> list[memoryview]:
        """Buffers of these ranges in order, merged where they touch. Raises ValueError for one not registered."""
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
    """The bytes at an address of this process, which must stay mapped while the array is used."""
    array: Bytes = np.ctypeslib.as_array((ctypes.c_uint8 * length).from_address(pointer))
    return array


def new_array(length: int) -> Bytes:
    """Zeroed bytes that begin at a page."""
    return np.frombuffer(mmap.mmap(-1, length), np.uint8)
