"""Blocks whose parent is not known: they wait, within a bound, until it comes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvevents import BlockRemoved, BlockStored, EngineHash


@dataclass(slots=True)
class Orphan:
    """A stored event whose parent is not known yet, and what was removed of it since."""

    event: BlockStored
    removals: list[BlockRemoved] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Its blocks and removals."""
        return len(self.event.block_hashes) + len(self.removals)


class Orphans:
    """The orphans of one target: at most `limit` blocks and their removals, a block told twice counts twice.

    The longest waiting go first.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._by_parent: OrderedDict[EngineHash, list[Orphan]] = OrderedDict()
        self._by_block: dict[EngineHash, Orphan] = {}
        self._size = 0

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
        dropped = 0
        while self._size > self.limit:
            oldest = next(iter(self._by_parent))
            dropped += sum(len(gone.event.block_hashes) for gone in self._take(oldest))
        return dropped

    def adopt(self, parents: Iterable[EngineHash]) -> list[Orphan]:
        """The events that wait for one of these blocks; they wait no longer."""
        return [orphan for parent in parents for orphan in self._take(parent)]

    def remove(self, engine_hash: EngineHash, event: BlockRemoved) -> bool:
        """Note that a waiting block was removed; False when it does not wait here."""
        orphan = self._by_block.get(engine_hash)
        if orphan is None:
            return False
        orphan.removals.append(BlockRemoved([engine_hash], event.medium, event.group_idx))
        self._size += 1
        return True

    def clear_medium(self, medium: str) -> None:
        """Forget the events of one medium."""
        waiting = self.adopt(list(self._by_parent))
        for orphan in waiting:
            if (orphan.event.medium or "GPU") != medium:
                self.park(orphan)

    def _take(self, parent: EngineHash) -> list[Orphan]:
        taken = self._by_parent.pop(parent, [])
        for orphan in taken:
            self._size -= orphan.size
            for engine_hash in orphan.event.block_hashes:
                if self._by_block.get(engine_hash) is orphan:
                    del self._by_block[engine_hash]
        return taken
