"""The index in Python: the specification of the native index, and its fallback where that is not built.

Matches of a prompt are computed from its path in the prefix tree.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from threading import Lock
from typing import TypeAlias

import msgspec

from indexer.dump import DumpedHolder, DumpedRun, DumpError, TargetDump
from indexer.hashing import PackedPrompt
from indexer.index import MOST_BLOCKS, ORPHAN_BLOCKS, Applied, Index, Match, TargetStatus
from indexer.pools.blocks import PoolBlocks, PythonPoolBlocks
from indexer.reference.holdings import Holder, Holdings, UnusableEventError
from indexer.reference.tree import PrefixTree, Span
from indexer.targets import Target
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, RejectedEvent, Tier, decode_batch
from kvevents.events import canonical_medium, is_pooled

_NONE = dict.fromkeys(Tier, 0)
# A target's holders in one span, each with the bits of its blocks there.
_Held: TypeAlias = list[tuple[Holder, int]]


def follow(spans: Iterable[Span[Holder]], block_size: int, tier: Tier | None = None) -> list[Match]:
    """Return the match of each target that holds a part of a prompt. Spans are read only as far as they match.

    - `tier`: the only tier whose blocks count; None: all tiers.
    """
    trails: dict[Holdings, list[tuple[int, _Held]]] = {}  # by target: matched blocks and holders in each span
    following: Collection[Holdings] | None = None
    for run, _, count in spans:
        held: dict[Holdings, _Held] = {}
        for pair in run.held.items():  # a run may have thousands of holders
            owner = pair[0].owner
            if tier is not None and pair[0].tier is not tier:
                continue
            if owner in held:
                held[owner].append(pair)
            elif owner.alive:
                held[owner] = [pair]
        if following is None:
            following = held
            trails = {owner: [] for owner in held}
        whole, further = (1 << count) - 1, []
        for owner in following:
            here = held.get(owner, [])
            bits = here[0][1] if len(here) == 1 and not owner.hybrid else _whole_prefix_bits(owner, here)
            if whole & ~bits:
                trails[owner].append((_leading_ones(bits, count), here))
            else:
                trails[owner].append((count, here))
                further.append(owner)
        following = further
        if not following:
            break
    matches = []
    for owner, trail in trails.items():
        blocks = trail[0][0] if len(trail) == 1 else sum([reach for reach, _ in trail])
        if owner.hybrid and blocks:
            blocks = _within_windows(owner, trail, blocks)
        if blocks:
            matches.append(Match(owner.target, blocks * block_size, _tiers(trail, blocks, block_size)))
    return matches


def _whole_prefix_bits(owner: Holdings, held: _Held) -> int:
    """Return the bits of the blocks that every whole-prefix group of a target holds, in any medium."""
    groups: Collection[int] = owner.whole_groups
    if owner.hybrid:
        groups = owner.counting_groups(groups, {holder.group for holder, _ in held if holder.window is None})
    by_group = dict.fromkeys(groups, 0)
    for holder, bits in held:
        if holder.window is None and holder.group in by_group:
            by_group[holder.group] |= bits
    common = -1 if by_group else 0
    for bits in by_group.values():
        common &= bits
    return common


def _within_windows(owner: Holdings, trail: list[tuple[int, _Held]], blocks: int) -> int:
    """Return the longest hit, of at most `blocks` blocks, after which every window group has its last blocks."""
    possible = (1 << blocks + 1) - 1  # bit n: a hit of n blocks
    windows = owner.windows
    for group in owner.counting_groups(windows, {holder.group for _, held in trail for holder, _ in held}):
        window = min(windows[group], blocks)  # the window of an event may be longer than any prompt
        live, before = 0, 0
        for reach, held in trail:
            for holder, bits in held:
                if holder.group == group:
                    live |= (bits & (1 << reach) - 1) << before
            before += reach
        # A hit that is shorter than the window needs all its blocks: treat the blocks before the prompt as live.
        run = live << window | (1 << window) - 1
        length = 1
        while length < window:  # bit n is set if the blocks n - length + 1 … n are live
            step = min(length, window - length)
            run &= run << step
            length += step
        possible &= run >> window - 1 if window else possible
    return possible.bit_length() - 1


def _tiers(trail: list[tuple[int, _Held]], blocks: int, block_size: int) -> dict[Tier, int]:
    """Return the matched tokens by the fastest tier that has them."""
    tokens = _NONE.copy()
    for reach, held in trail:
        matched = reach if reach < blocks else blocks
        blocks -= matched
        if len(held) == 1:  # the only holder has every matched block
            tokens[held[0][0].tier] += matched * block_size
            continue
        left = (1 << matched) - 1
        for holder, bits in sorted(held, key=lambda pair: pair[0].tier):
            if holder.window is None:
                tokens[holder.tier] += (bits & left).bit_count() * block_size
                left &= ~bits
    return tokens


def _leading_ones(bits: int, count: int) -> int:
    """Return how many of the lowest `count` bits are set without a gap."""
    missing = ~bits & (1 << count) - 1
    return count if not missing else (missing & -missing).bit_length() - 1


# Blocks of a dropped target that one sweep frees. The limit keeps each pause short.
_SWEEP_BLOCKS = 2048
# Blocks that are applied before the lock is released for a match.
_BLOCKS_A_TURN = 256
_DEVICE = (None, "GPU")
# A thread that applies payloads pauses this often, for a moment, so that other threads receive Python's lock at once.
_PAUSE_EVERY = 0.0005
_PAUSE_SECONDS = 0.00005


class PythonIndex(Index):
    """Index in Python, with one lock that is held for a few blocks, one stored event or one match at a time."""

    def __init__(self, secret: str = "", orphan_blocks: int = ORPHAN_BLOCKS, most_blocks: int = MOST_BLOCKS) -> None:
        super().__init__(secret)
        self._most_blocks = most_blocks
        self._orphan_blocks = orphan_blocks
        self._lock = Lock()
        self._tree: PrefixTree[Holder] = PrefixTree()
        self._holdings: dict[Target, Holdings] = {}
        self._dropped: deque[Holdings] = deque()
        self._paused_at = 0.0

    def add(self, target: Target, adapter: str | None = None, capacity: int | None = None) -> None:
        with self._lock:
            if target not in self._holdings:
                self._holdings[target] = self._empty(target, adapter, capacity)

    def attach(self, target: Target, pool: PoolBlocks) -> None:
        assert isinstance(pool, PythonPoolBlocks)
        with self._lock:
            self._holdings[target].pool = pool

    def apply_payload(self, target: Target, payload: bytes) -> Applied:
        batch = decode_batch(payload)
        rejected = batch.rejected + self.apply(target, batch, self._pause)
        return Applied(
            rejected, any(type(event) is AllBlocksCleared and event.medium is None for event in batch.events)
        )

    def apply(
        self, target: Target, batch: EventBatch, between_turns: Callable[[], None] = lambda: None
    ) -> list[RejectedEvent]:
        rejected: list[RejectedEvent] = []
        sizes = len(self.block_sizes([target]))
        for turn in _turns(batch.events):
            with self._lock:
                for number, event in turn:
                    holdings = self._holdings.get(target)
                    if holdings is None:
                        return rejected
                    elsewhere = event.medium not in _DEVICE or (type(event) is BlockStored and event.locality)
                    if elsewhere and _apply_to_pool(event, holdings):
                        continue
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
            between_turns()
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

    def match_from(
        self, root: int, block_size: int, prompt: PackedPrompt, blocks: int, tier: Tier | None = None
    ) -> list[Match]:
        if blocks <= 0:
            return []
        hashes = prompt.hashes(root, block_size, 1)
        if not self._tree.begins_with(hashes[0]):
            return []
        with self._lock:
            spans = self._tree.walk(hashes, blocks, partial(prompt.hashes, root, block_size))
            return follow(spans, block_size, tier)

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

    def _pause(self) -> None:
        """Pause for a moment, if the last pause was some time ago."""
        if time.monotonic() - self._paused_at > _PAUSE_EVERY:
            time.sleep(_PAUSE_SECONDS)
            self._paused_at = time.monotonic()

    def _empty(self, target: Target, adapter: str | None, capacity: int | None) -> Holdings:
        return Holdings(self._tree, target, self.secret, self._orphan_blocks, adapter, capacity, self._most_blocks)

    def _replace(self, target: Target) -> None:
        old = self._holdings[target]
        new = self._holdings[target] = self._empty(target, old.adapter, old.capacity)
        new.block_sizes = old.block_sizes
        new.pool = old.pool
        new.counters = old.counters
        new.counters.cleared += 1
        self.cleared.add(target)
        self._retire(old)

    def _retire(self, holdings: Holdings) -> None:
        holdings.alive = False
        if not holdings.release_some(_SWEEP_BLOCKS):
            self._dropped.append(holdings)


def _turns(events: list[Event]) -> Iterator[list[tuple[int, Event]]]:
    """Yield the events with their numbers, in turns of at most `_BLOCKS_A_TURN` blocks or one stored event.

    The removal of many blocks is split. A stored event is not, because it is valid or invalid as a whole.
    """
    turn: list[tuple[int, Event]] = []
    left = _BLOCKS_A_TURN
    for number, event in enumerate(events):
        if type(event) is BlockStored:
            turn.append((number, event))
            left -= len(event.block_hashes) + 1
        else:
            for part in _parts(event):
                turn.append((number, part))
                left -= 1 if isinstance(part, AllBlocksCleared) else len(part.block_hashes) + 1
                if left <= 0:
                    yield turn
                    turn, left = [], _BLOCKS_A_TURN
        if left <= 0:
            yield turn
            turn, left = [], _BLOCKS_A_TURN
    if turn:
        yield turn


def _apply_to_pool(event: Event, holdings: Holdings) -> bool:
    """Give a pool the hint of an event about it, or ignore the event. Return False for one about the device or host."""
    event.medium = canonical_medium(event.medium)
    if holdings.pool is not None and event.medium in holdings.pool.media:
        holdings.pool.hint(event)
        return True
    if is_pooled(event.medium, event.locality if type(event) is BlockStored else None):
        holdings.counters.ignored += 1
        return True
    return False


def _parts(event: Event) -> Iterable[Event]:
    if not isinstance(event, BlockRemoved) or len(event.block_hashes) <= _BLOCKS_A_TURN:
        return (event,)
    if is_pooled(canonical_medium(event.medium), None):  # ignored, and counted once
        return (event,)
    hashes = event.block_hashes
    starts = range(0, len(hashes), _BLOCKS_A_TURN)
    return (msgspec.structs.replace(event, block_hashes=hashes[at : at + _BLOCKS_A_TURN]) for at in starts)
