"""Giving memory back to the system: what was free in between stays with the process otherwise."""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def _malloc_trim() -> Callable[[int], object] | None:
    try:
        return ctypes.CDLL(None).malloc_trim  # of glibc; called without Python's lock
    except (AttributeError, OSError, TypeError):
        return None


_trim = _malloc_trim()


def give_back() -> None:
    """Return free memory to the system, where the C library can."""
    if _trim is not None:
        _trim(0)
