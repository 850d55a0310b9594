"""JSON that every parser reads alike; and long bodies without what their strings hold, which are read in little time.

Skeletons are made by the native core, which lets other threads run meanwhile. Without it there are none.
"""

from __future__ import annotations

import sys
from typing import Any, Final, NamedTuple

import jiter

from indexer.cores import native_core

# Bodies of no more bytes are read in no time as they are.
LONG: Final = 64 * 1024


class BodyField(NamedTuple):
    """Where one of the outermost fields is in a body's bytes: its name with the quotes, and its value."""

    name_start: int
    name_end: int
    start: int
    end: int


class Skeleton(NamedTuple):
    """`text`: the same JSON with empty strings, but for names. `values`: how many it has; the rest is of no use where
    those are more than were asked for."""

    text: bytes
    fields: list[BodyField]
    values: int


def skeleton_of(body: bytes, most_values: int = sys.maxsize) -> Skeleton | None:
    """The skeleton of a long body; None of a short one, and without the native core.

    Raises ValueError for a string that not every parser reads alike. Other mistakes of the body are its skeleton's too.
    """
    native = native_core() if len(body) > LONG else None
    if native is None:
        return None
    made = native.json_skeleton(body, most_values)
    if made is None:
        raise ValueError("a string is not as every parser reads it")
    text, fields, values = made
    return Skeleton(text, [BodyField(*each) for each in fields], values)


def strict_json(text: bytes) -> Any:
    """What JSON says where every parser reads it alike. Raises ValueError."""
    return jiter.from_json(text, allow_inf_nan=False, cache_mode="none", catch_duplicate_keys=True)
