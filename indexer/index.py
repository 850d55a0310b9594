"""The index: which target holds which prefix.

Four verbs: apply a batch of events to a target, clear a target, drop a target, match a prompt. Safe to call from
several threads; the lock is held for a few events or one match at a time.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from threading import Lock

from indexer.dump import DumpedHolder, DumpedRun, DumpError, TargetDump
from indexer.hashing import Namespace, PackedPrompt, namespace_hash
from indexer.holdings import Holder, Holdings, HoldingsCounters, Target, UnusableEventError
from indexer.matching import Match, follow
from indexer.tree import PrefixTree
from kvevents import BlockRemoved, BlockStored, EventBatch, RejectedEvent, Tier

# How much of a dropped target is freed with each batch: keeps every pause short.
_SWEEP_BLOCKS = 2048
# Events applied before a match may come in between.
_EVENTS_A_TURN = 64


@dataclass(frozen=True, slots=True)
class TargetStatus:
    """What the index knows of one target: blocks by tier, block sizes seen in tokens, orphaned blocks, and counters."""

    blocks: dict[Tier, int]
    block_sizes: frozenset[int]
    orphans: int
    counters: HoldingsCounters


class Index:
    """Prefix holdings of all targets. `secret` makes prefix hashes unpredictable for those who don't know it.

    `block_size_changes` counts how often the block sizes of any target may have changed.
    """

    def __init__(self, secret: str = "", orphan_blocks: int = 65_536) -> None:
        self._secret = secret
        self._orphan_blocks = orphan_blocks
        self._lock = Lock()
        self._tree: PrefixTree[Holder] = PrefixTree()
        self._holdings: dict[Target, Holdings] = {}
        self._dropped: deque[Holdings] = deque()
        self.block_size_changes = 0

    def add(self, target: Target, adapter: str | None = None, capacity: int | None = None) -> None:
        """Make a target known; it holds nothing yet. Does nothing when it is known.

        Events that name no adapter are taken to be about `adapter`. `capacity`: how many blocks its engine's own
        memory has, None if that is not known.
        """
        with self._lock:
            if target not in self._holdings:
                self._holdings[target] = self._empty(target, adapter, capacity)

    def apply(self, target: Target, batch: EventBatch) -> list[RejectedEvent]:
        """Apply a batch in order. Returns the events that made no sense; the others are applied."""
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
        """Forget what a target holds."""
        with self._lock:
            if target in self._holdings:
                self._replace(target)

    def drop(self, target: Target) -> None:
        """Forget a target."""
        with self._lock:
            holdings = self._holdings.pop(target, None)
            self.block_size_changes += 1
            if holdings is not None:
                self._retire(holdings)

    def match(self, namespace: Namespace, prompt: PackedPrompt, blocks: int | None = None) -> list[Match]:
        """What each target holds of a prompt's first `blocks` blocks (None: all full ones).

        Targets that hold nothing of it are left out. The prompt is hashed no further than one of them holds it, give
        or take what a run of the tree has.
        """
        block_size = namespace.block_size
        limit = len(prompt) // block_size if blocks is None else blocks
        return self.match_from(namespace_hash(namespace, self._secret), block_size, prompt, limit)

    def match_from(self, root: int, block_size: int, prompt: PackedPrompt, blocks: int) -> list[Match]:
        """The same in the namespace whose hash is `root`. `block_size` in tokens."""
        if blocks <= 0:
            return []
        hashes = prompt.hashes(root, block_size, 1)
        if not self._tree.begins_with(hashes[0]):
            return []
        with self._lock:
            return follow(self._tree.walk(hashes, blocks, partial(prompt.hashes, root, block_size)), block_size)

    def match_hashes(self, hashes: array[int], block_size: int) -> list[Match]:
        """The same for a prompt whose prefix hashes are known. `block_size` in tokens."""
        with self._lock:
            return follow(self._tree.walk(hashes, len(hashes), lambda _: hashes), block_size)

    def dump(self, target: Target) -> tuple[list[DumpedRun], list[DumpedHolder]]:
        """What a target holds; nothing when it is not known."""
        with self._lock:
            holdings = self._holdings.get(target)
            return holdings.dump() if holdings else ([], [])

    def restore(self, target: Target, dump: TargetDump) -> None:
        """Let a target that holds nothing yet hold what a dump says. Raises DumpError; it then holds nothing."""
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
        """What a target holds now; None when it is not known."""
        with self._lock:
            holdings = self._holdings.get(target)
            if holdings is None:
                return None
            return TargetStatus(
                holdings.blocks_by_tier(), frozenset(holdings.block_sizes), holdings.orphans, holdings.counters
            )

    def block_sizes(self, targets: Iterable[Target]) -> set[int]:
        """The block sizes, in tokens, of the blocks these targets ever stored."""
        known = (self._holdings.get(target) for target in targets)
        return set[int]().union(*(holdings.block_sizes for holdings in known if holdings is not None))

    def sweep(self) -> None:
        """Free a part of what was cleared or dropped."""
        if not self._dropped:
            return
        with self._lock:
            if self._dropped and self._dropped[0].release_some(_SWEEP_BLOCKS):
                self._dropped.popleft()

    def check_integrity(self) -> None:
        """Assert what must always be true of the tree (for tests)."""
        with self._lock:
            self._tree.check_integrity()

    @property
    def runs(self) -> int:
        """The size of the tree in runs of blocks."""
        return len(self._tree)

    def _empty(self, target: Target, adapter: str | None, capacity: int | None) -> Holdings:
        return Holdings(self._tree, target, self._secret, self._orphan_blocks, adapter, capacity)

    def _replace(self, target: Target) -> None:
        old = self._holdings[target]
        new = self._holdings[target] = self._empty(target, old.adapter, old.capacity)
        new.block_sizes = old.block_sizes
        new.counters = old.counters
        new.counters.cleared += 1
        self._retire(old)

    def _retire(self, holdings: Holdings) -> None:
        holdings.alive = False
        if not holdings.release_some(_SWEEP_BLOCKS):
            self._dropped.append(holdings)
