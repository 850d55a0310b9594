"""Copies between addresses of this process: small runs many at a time, large ones by themselves."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from worker.disaggregation.transfer.memory import Bytes, Memory
from worker.disaggregation.transfer.runs import Addresses, Writes

_SMALL = 1 << 14  # bytes; above, a step of Python for each run costs less than to copy it twice
_LARGE = 1 << 16  # bytes; up to here a copy is quicker than giving up the interpreter lock and getting it back
_AT_ONCE = 1 << 19  # bytes of small runs, which pass through the processor's cache


def copy_runs(writes: Writes, sources: Memory, destinations: Memory) -> None:
    """Copy all runs. Raises ValueError, before anything is copied, when one lies outside of its memory."""
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
    """A row of `length` bytes for every address from the lowest to the highest, mapped or not."""
    lowest, highest = int(addresses.min()), int(addresses.max())
    interface = {
        "data": (lowest, False),
        "shape": (highest - lowest + 1, length),
        "strides": (1, 1),
        "typestr": "|u1",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))
