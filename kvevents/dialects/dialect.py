"""The interface of a dialect: how one generation of an engine's publisher writes events, and how to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from kvevents.events import BlockStored, Event

RawEvent: TypeAlias = msgspec.Raw | bytes


def _as_it_is(event: BlockStored) -> BlockStored:
    return event


@dataclass(frozen=True, slots=True)
class Dialect:
    """One form of the events in a batch.

    - `read`: decodes an event from msgpack. Returns None for another dialect. Raises msgspec.DecodeError if it is
      unreadable.
    - `write`: returns the data that represents an event in the batch of a DP rank.
    - `expressible`: returns a stored event in a form that the dialect can express; None if it has none. Without its
      whole identity, an index would mistake a block for another one. Then it must not be published.
    """

    read: Callable[[RawEvent], Event | None]
    write: Callable[[Event, int | None], Any]
    expressible: Callable[[BlockStored], BlockStored | None] = _as_it_is
    hash_types: frozenset[type[int] | type[bytes]] = frozenset({int, bytes})


def is_map(raw: RawEvent) -> bool:
    """Return whether msgpack data is a map."""
    first = memoryview(raw)[0]
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def salt_in_first_keys(event: BlockStored) -> BlockStored:
    """Move the salt to the extra keys of a sequence's first block, behind all others, as vLLM does."""
    if event.cache_salt is None:
        return event
    keys = event.extra_keys
    if event.parent_block_hash is None and event.block_hashes:
        rest = list(keys) if keys else [None] * len(event.block_hashes)
        keys = [[*(rest[0] or []), event.cache_salt], *rest[1:]]
    return msgspec.structs.replace(event, cache_salt=None, extra_keys=keys)


def only_full_attention(event: BlockStored, *, adapter: bool) -> BlockStored | None:
    """Return the event if its identity needs no extra keys, no cache group and no inexpressible adapter; else None."""
    other_keys = event.extra_keys is not None and any(event.extra_keys)
    if other_keys or adapter or event.group_idx or event.kv_cache_spec_kind not in (None, "full_attention"):
        return None
    return event
