"""The blocks of a simulated engine's KV cache."""

from __future__ import annotations

from collections import OrderedDict


class BlockCache:
    """The blocks of an engine: named ones, which prompts can reuse by id, and unnamed ones, which are only counted."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.unnamed = 0
        self._used: dict[int, int] = {}  # references by id
        self._idle: OrderedDict[int, None] = OrderedDict()  # used by no request; the first is evicted first
        self.removed: list[int] = []  # since `take_removed`

    @property
    def in_use(self) -> int:
        """The number of blocks that cannot be evicted."""
        return len(self._used) + self.unnamed

    @property
    def free(self) -> int:
        """The number of blocks that no request uses. Some of them may hold reusable prefixes."""
        return self.capacity - self.in_use

    def __contains__(self, block: object) -> bool:
        """Return whether the cache holds a block."""
        return block in self._used or block in self._idle

    def matched(self, ids: tuple[int, ...]) -> int:
        """Return how many leading blocks of a prompt the cache holds."""
        for place, block in enumerate(ids):
            if block not in self._used and block not in self._idle:
                return place
        return len(ids)

    def acquire(self, ids: tuple[int, ...], others: int) -> bool:
        """Use held blocks, and `others` unnamed ones. Return False, and change nothing, if they do not fit."""
        revived = sum(block in self._idle for block in ids)
        if self.in_use + revived + others > self.capacity:
            return False
        for block in ids:
            self._idle.pop(block, None)
            self._used[block] = self._used.get(block, 0) + 1
        self.grow(others)
        return True

    def grow(self, others: int) -> None:
        """Use unnamed blocks that are free. The least recently used blocks are evicted for them."""
        self.unnamed += others
        while self.in_use + len(self._idle) > self.capacity:
            self.removed.append(self._idle.popitem(last=False)[0])

    def name(self, block: int) -> bool:
        """Name a block that was computed. Return False if the cache holds a block of this id already."""
        if block in self._used or block in self._idle:
            return False
        self.unnamed -= 1
        self._used[block] = 1
        return True

    def release(self, ids: list[int], others: int) -> None:
        """Stop using named blocks, given in their order, and `others` unnamed ones."""
        self.unnamed -= others
        for block in reversed(ids):
            self._used[block] -= 1
            if not self._used[block]:
                del self._used[block]
                self._idle[block] = None

    def take_removed(self) -> list[int]:
        """Return the ids of the blocks that were evicted since the last call."""
        removed, self.removed = self.removed, []
        return removed
