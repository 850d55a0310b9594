"""The index in Python: the specification of the native index, and its fallback where that is not built."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from functools import partial
from threading import Lock

from indexer.dump import DumpedHolder, DumpedRun, DumpError, TargetDump
from indexer.hashing import PackedPrompt
from indexer.index import MOST_BLOCKS, ORPHAN_BLOCKS, Applied, Index, Match, TargetStatus
from indexer.reference.holdings import Holder, Holdings, UnusableEventError
from indexer.reference.matching import follow
from indexer.reference.tree import PrefixTree
from indexer.targets import Target
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, RejectedEvent, decode_batch

# Blocks of a dropped target that one sweep frees. The limit keeps each pause short.
_SWEEP_BLOCKS = 2048
# Events that are applied before the lock is released for a match.
_EVENTS_A_TURN = 64


class PythonIndex(Index):
    """Index in Python, with one lock that is held for a few events or one match at a time."""

    def __init__(self, secret: str = "", orphan_blocks: int = ORPHAN_BLOCKS, most_blocks: int = MOST_BLOCKS) -> None:
        super().__init__(secret)
        self._most_blocks = most_blocks
        self._orphan_blocks = orphan_blocks
        self._lock = Lock()
        self._tree: PrefixTree[Holder] = PrefixTree()
        self._holdings: dict[Target, Holdings] = {}
        self._dropped: deque[Holdings] = deque()

    def add(self, target: Target, adapter: str | None = None, capacity: int | None = None) -> None:
        with self._lock:
            if target not in self._holdings:
                self._holdings[target] = self._empty(target, adapter, capacity)

    def apply_payload(self, target: Target, payload: bytes) -> Applied:
        batch = decode_batch(payload)
        rejected = batch.rejected + self.apply(target, batch)
        return Applied(
            rejected, any(type(event) is AllBlocksCleared and event.medium is None for event in batch.events)
        )

    def apply(self, target: Target, batch: EventBatch) -> list[RejectedEvent]:
        rejected: list[RejectedEvent] = []
        sizes = len(self.block_sizes([target]))
        for first in range(0, len(batch.events), _EVENTS_A_TURN):
            with self._lock:
                for number, event in enumerate(batch.events[first : first + _EVENTS_A_TURN], first):
                    holdings = self._holdings.get(target)
                    if holdings is None:
                        return rejected
                    try:
                        if type(event) is BlockStored:
                            holdings.store(event)
                        elif type(event) is BlockRemoved:
                            holdings.remove(event)
                        elif event.medium is None:
                            self._replace(target)
                        else:
                            holdings.clear_medium(event.medium)
                    except UnusableEventError as error:
                        rejected.append(RejectedEvent(number, str(error)))
        with self._lock:
            if holdings := self._holdings.get(target):
                holdings.keep_within_capacity()
                self.block_size_changes += len(holdings.block_sizes) != sizes
        self.sweep()
        return rejected

    def clear(self, target: Target) -> None:
        with self._lock:
            if target in self._holdings:
                self._replace(target)

    def drop(self, target: Target) -> None:
        with self._lock:
            holdings = self._holdings.pop(target, None)
            self.cleared.discard(target)
            self.block_size_changes += 1
            if holdings is not None:
                self._retire(holdings)

    def match_from(self, root: int, block_size: int, prompt: PackedPrompt, blocks: int) -> list[Match]:
        if blocks <= 0:
            return []
        hashes = prompt.hashes(root, block_size, 1)
        if not self._tree.begins_with(hashes[0]):
            return []
        with self._lock:
            return follow(self._tree.walk(hashes, blocks, partial(prompt.hashes, root, block_size)), block_size)

    def match_hashes(self, hashes: array[int], block_size: int) -> list[Match]:
        with self._lock:
            return follow(self._tree.walk(hashes, len(hashes), lambda _: hashes), block_size)

    def dump(self, target: Target) -> tuple[list[DumpedRun], list[DumpedHolder]]:
        with self._lock:
            holdings = self._holdings.get(target)
            return holdings.dump() if holdings else ([], [])

    def restore(self, target: Target, dump: TargetDump) -> None:
        with self._lock:
            holdings = self._holdings[target]
            holdings.block_sizes.update(dump.block_sizes)
            self.block_size_changes += 1
            try:
                holdings.restore(dump.runs, dump.holders)
            except DumpError:
                self._replace(target)
                raise

    def status(self, target: Target) -> TargetStatus | None:
        with self._lock:
            holdings = self._holdings.get(target)
            if holdings is None:
                return None
            return TargetStatus(
                holdings.blocks_by_tier(),
                frozenset(holdings.block_sizes),
                holdings.orphans,
                holdings.counters,
                holdings.shortest_window,
            )

    def block_sizes(self, targets: Iterable[Target]) -> set[int]:
        known = (self._holdings.get(target) for target in targets)
        return set[int]().union(*(holdings.block_sizes for holdings in known if holdings is not None))

    def sweep(self) -> None:
        if not self._dropped:
            return
        with self._lock:
            if self._dropped and self._dropped[0].release_some(_SWEEP_BLOCKS):
                self._dropped.popleft()

    def check_integrity(self) -> None:
        with self._lock:
            self._tree.check_integrity()

    @property
    def runs(self) -> int:
        return len(self._tree)

    def _empty(self, target: Target, adapter: str | None, capacity: int | None) -> Holdings:
        return Holdings(self._tree, target, self.secret, self._orphan_blocks, adapter, capacity, self._most_blocks)

    def _replace(self, target: Target) -> None:
        old = self._holdings[target]
        new = self._holdings[target] = self._empty(target, old.adapter, old.capacity)
        new.block_sizes = old.block_sizes
        new.counters = old.counters
        new.counters.cleared += 1
        self.cleared.add(target)
        self._retire(old)

    def _retire(self, holdings: Holdings) -> None:
        holdings.alive = False
        if not holdings.release_some(_SWEEP_BLOCKS):
            self._dropped.append(holdings)
