"""Settings of a server process's memory."""

from __future__ import annotations

import ctypes
import gc

# glibc's names for what mallopt sets, and the values they are given here.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 64 * 1024 * 1024
_OWN_MAPPING_BYTES = 4 * 1024 * 1024


def keep_freed_memory() -> None:
    """Keep some freed memory for the next bodies, up to 64 MiB.

    By default glibc returns freed memory to the system from 128 KiB on. The next body of that size would then have its
    pages mapped and cleared again. With another C library this does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)


def collect_rarely() -> None:
    """Look for cycles of garbage less often: requests make none, and what was made until now stays.

    The default looks after 700 objects that are in use at once, which any load has.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
