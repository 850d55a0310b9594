"""What a dialect is: how one generation of an engine's publisher writes an event, and how it is read back."""

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
    """One way to write the events of a batch.

    `read`: the event in a piece of msgpack; None when it is not of this dialect. Raises msgspec.DecodeError when it is,
    and cannot be read. `write`: what stands for an event in the batch of a DP rank.

    `expressible`: a stored event as the dialect can tell it, None when it has no words for it. An index that hears of a
    block without all that tells it apart would take it for another one: such blocks are better not spoken of.
    `hash_types`: what a block hash may be.
    """

    read: Callable[[RawEvent], Event | None]
    write: Callable[[Event, int | None], Any]
    expressible: Callable[[BlockStored], BlockStored | None] = _as_it_is
    hash_types: frozenset[type[int] | type[bytes]] = frozenset({int, bytes})


def is_map(raw: RawEvent) -> bool:
    """Whether a piece of msgpack is a map."""
    first = memoryview(raw)[0]
    return 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def salt_in_first_keys(event: BlockStored) -> BlockStored:
    """vLLM names the salt in the extra keys of a sequence's first block, after all others."""
    if event.cache_salt is None:
        return event
    keys = event.extra_keys
    if event.parent_block_hash is None and event.block_hashes:
        rest = list(keys) if keys else [None] * len(event.block_hashes)
        keys = [[*(rest[0] or []), event.cache_salt], *rest[1:]]
    return msgspec.structs.replace(event, cache_salt=None, extra_keys=keys)


def only_full_attention(event: BlockStored, *, adapter: bool) -> BlockStored | None:
    """The event where it needs no extra keys, no cache group, and no adapter of the kind that cannot be named."""
    other_keys = event.extra_keys is not None and any(event.extra_keys)
    if other_keys or adapter or event.group_idx or event.kv_cache_spec_kind not in (None, "full_attention"):
        return None
    return event
