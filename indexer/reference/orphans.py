"""Blocks whose parent is not known: they wait, within a bound, until it comes."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from typing import TypeAlias

import msgspec

from kvevents import BlockRemoved, BlockStored, EngineHash

# A block, and the cache group and the medium that it left.
Removal: TypeAlias = tuple[EngineHash, int, str]

# A bound in blocks would not bound their tokens and keys.
_BYTES_A_BLOCK = 1024
_encode = msgspec.msgpack.Encoder().encode


class Orphan:
    """A stored event whose parent is not known yet, and what was removed of it since, with how often that was told."""

    __slots__ = ("_tokens", "event", "event_bytes", "removals")

    def __init__(self, event: BlockStored) -> None:
        self.event = event
        self.removals: dict[Removal, int] = {}
        self.event_bytes = len(_encode(event))
        self._tokens = array("I", event.token_ids)  # a ninth of a list of them
        event.token_ids = []

    def whole_event(self) -> BlockStored:
        """The event as it came."""
        self.event.token_ids = self._tokens.tolist()
        return self.event

    @property
    def size(self) -> int:
        """Its blocks and removals."""
        return len(self.event.block_hashes) + len(self.removals)

    @property
    def bytes(self) -> int:
        """About what it takes."""
        return self.event_bytes + 64 * self.size


class Orphans:
    """The orphans of one target: at most `limit` blocks and their removals, a block told twice counts twice.

    The longest waiting go first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_parent: OrderedDict[EngineHash, list[Orphan]] = OrderedDict()
        self._by_block: dict[EngineHash, Orphan] = {}
        self._size = 0
        self._bytes = 0

    def __len__(self) -> int:
        """The number of waiting blocks."""
        return len(self._by_block)

    def park(self, orphan: Orphan) -> int:
        """Keep an event until its parent comes. Returns how many older blocks had to go for it."""
        parent = orphan.event.parent_block_hash
        assert parent is not None
        self._by_parent.setdefault(parent, []).append(orphan)
        self._by_block.update(dict.fromkeys(orphan.event.block_hashes, orphan))
        self._size += orphan.size
        self._bytes += orphan.bytes
        return self._keep_limit()

    def adopt(self, parents: Iterable[EngineHash]) -> list[Orphan]:
        """The events that wait for one of these blocks; they wait no longer."""
        return [orphan for parent in parents for orphan in self._take(parent)]

    def remove(self, engine_hash: EngineHash, event: BlockRemoved) -> int | None:
        """Note that a waiting block was removed; None when it does not wait here.

        Returns how many older blocks had to go for the note.
        """
        orphan = self._by_block.get(engine_hash)
        if orphan is None:
            return None
        removal = engine_hash, event.group_idx or 0, event.medium or "GPU"
        told = orphan.removals.get(removal, 0)
        if told == 0:
            self._size += 1
            self._bytes += 64
        orphan.removals[removal] = told + 1
        return self._keep_limit()

    def clear_medium(self, medium: str) -> None:
        """Forget the events of one medium."""
        waiting = self.adopt(list(self._by_parent))
        for orphan in waiting:
            if (orphan.event.medium or "GPU") != medium:
                self.park(orphan)

    def _keep_limit(self) -> int:
        dropped = 0
        while self._size > self.limit or self._bytes > self.limit * _BYTES_A_BLOCK:
            oldest = next(iter(self._by_parent))
            dropped += sum(len(gone.event.block_hashes) for gone in self._take(oldest))
        return dropped

    def _take(self, parent: EngineHash) -> list[Orphan]:
        taken = self._by_parent.pop(parent, [])
        for orphan in taken:
            self._size -= orphan.size
            self._bytes -= orphan.bytes
            for engine_hash in orphan.event.block_hashes:
                if self._by_block.get(engine_hash) is orphan:
                    del self._by_block[engine_hash]
        return taken
