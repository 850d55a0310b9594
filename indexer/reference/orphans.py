"""Orphans: stored blocks whose parent is unknown. A limited number of them waits for the parent."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from kvevents import BlockRemoved, BlockStored, EngineHash

# Engine hash of a removed block, with its cache group and its medium.
Removal: TypeAlias = tuple[EngineHash, int, str]

# Limit of memory per block, because a limit in blocks would not limit their tokens and keys.
_BYTES_A_BLOCK = 1024
_encode = msgspec.msgpack.Encoder().encode


class Orphan:
    """A stored event whose parent is unknown, and the later removals of its blocks with their counts."""

    __slots__ = ("_tokens", "event", "event_bytes", "removals")

    def __init__(self, event: BlockStored) -> None:
        self.event = event
        self.removals: dict[Removal, int] = {}
        self.event_bytes = len(_encode(event))
        self._tokens = array("I", event.token_ids)  # takes a ninth of the memory of a list
        event.token_ids = []

    def whole_event(self) -> BlockStored:
        """Return the event with its token ids."""
        self.event.token_ids = self._tokens.tolist()
        return self.event

    @property
    def size(self) -> int:
        """Number of blocks and removals."""
        return len(self.event.block_hashes) + len(self.removals)

    @property
    def bytes(self) -> int:
        """Approximate memory."""
        return self.event_bytes + 64 * self.size


class Orphans:
    """Orphans of one target: at most `limit` blocks and removals, the newest. A block in two events counts twice."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_parent: OrderedDict[EngineHash, list[Orphan]] = OrderedDict()
        self._by_block: dict[EngineHash, Orphan] = {}
        self._size = 0
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._by_block)

    def park(self, orphan: Orphan) -> int:
        """Keep an event until its parent is stored. Returns the number of older blocks that were dropped for it."""
        parent = orphan.event.parent_block_hash
        assert parent is not None
        self._by_parent.setdefault(parent, []).append(orphan)
        self._by_block.update(dict.fromkeys(orphan.event.block_hashes, orphan))
        self._size += orphan.size
        self._bytes += orphan.bytes
        return self._keep_limit()

    def adopt(self, parents: Iterable[EngineHash]) -> list[Orphan]:
        """Remove and return the events whose parent is one of these blocks."""
        return [orphan for parent in parents for orphan in self._pop(parent)]

    def remove(self, engine_hash: EngineHash, event: BlockRemoved, times: int) -> int | None:
        """Record removals of a waiting block. Return the older blocks dropped for it; None if it does not wait."""
        orphan = self._by_block.get(engine_hash)
        if orphan is None:
            return None
        removal = engine_hash, event.group_idx or 0, event.medium or "GPU"
        count = orphan.removals.get(removal, 0)
        if count == 0:
            self._size += 1
            self._bytes += 64
        orphan.removals[removal] = count + times
        return self._keep_limit()

    def clear_medium(self, medium: str) -> None:
        """Drop the events of one medium."""
        waiting = self.adopt(list(self._by_parent))
        for orphan in waiting:
            if (orphan.event.medium or "GPU") != medium:
                self.park(orphan)

    def _keep_limit(self) -> int:
        dropped = 0
        while self._size > self.limit or self._bytes > self.limit * _BYTES_A_BLOCK:
            oldest = next(iter(self._by_parent))
            dropped += sum(len(orphan.event.block_hashes) for orphan in self._pop(oldest))
        return dropped

    def _pop(self, parent: EngineHash) -> list[Orphan]:
        orphans = self._by_parent.pop(parent, [])
        for orphan in orphans:
            self._size -= orphan.size
            self._bytes -= orphan.bytes
            for engine_hash in orphan.event.block_hashes:
                if self._by_block.get(engine_hash) is orphan:
                    del self._by_block[engine_hash]
        return orphans
