"""How far two texts begin alike: by the index's native core where it was built, else by its twin here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from indexer.cores import native_core


def common_start_by_halves(one: Any, other: Any) -> int:
    """How many characters of two texts, or bytes, begin alike: by comparisons of half of what is left."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one.startswith(other[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


_native = native_core()
common_start: Callable[[Any, Any], int] = common_start_by_halves if _native is None else _native.common
