"""What one target (a DP rank of a worker) holds: its blocks' places in the prefix tree, counted by group and medium.

One file, because it is the specification that the native core is compared with: what each event does to one target.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias, TypeVar

from xxhash import xxh3_64_intdigest

from indexer.dump import DumpedHolder, DumpedRun, DumpError, read_hash, written_hash
from indexer.hashing import Namespace, extend_prefix_hashes, namespace_hash, pack_tokens
from indexer.reference.orphans import Orphan, Orphans, Removal
from indexer.reference.tree import PrefixTree, Run, split_position
from indexer.targets import HoldingsCounters, Target
from kvevents import BlockRemoved, BlockStored, EngineHash, Tier, tier_of
from kvevents.identity import identity_of

# Cache groups of hybrid models. These hold every block of a prefix, and so tell what a block's prefix is …
_WHOLE_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
# … these only the blocks in reach of the last token …
_SLIDING_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
# … and these only the state after a block.
_STATE_KINDS = frozenset({"mamba", "linear_attention"})

# What one stream may bring of things that are few; `indexer/native/holdings.hpp` has the same.
_MOST_HOLDERS = 64
_MOST_BLOCK_SIZES = 8
_MOST_ADAPTERS_IN_KEYS = 1024

# Of a run's children, before it is taken for granted that one of them is held. `indexer/native/tree.hpp` has the same.
_CHILDREN_LOOKED_AT = 64

K = TypeVar("K")


class UnusableEventError(ValueError):
    """An event that was read but makes no sense."""


@dataclass(eq=False, slots=True)
class Holder:
    """The blocks a target holds in one medium for one cache group: where in the tree each engine hash is.

    `window`: None for a group that needs every block of a prefix, else how many of the last blocks it needs.
    """

    owner: Holdings
    group: int
    tier: Tier
    window: int | None = None
    told: int = 0  # stored events
    positions: dict[EngineHash, int] = field(default_factory=dict)
    # Engines may keep a block in several physical copies and report the removal of each: copies beyond the first.
    extra_copies: dict[EngineHash, int] = field(default_factory=dict)
    # An engine may tell blocks apart that are one to us: engine hashes beyond the first, by their place.
    namesakes: dict[int, int] = field(default_factory=dict)


# A run and the offset of a block in it.
Place: TypeAlias = tuple[Run[Holder], int]


class Holdings:
    """One target's blocks in the shared tree.

    `adapter` is the one of events that name none. `capacity`: the blocks the engine's own memory has, None if unknown.
    `most_blocks`: more than all memories of any engine have.
    """

    def __init__(
        self,
        tree: PrefixTree[Holder],
        target: Target,
        secret: str,
        orphan_blocks: int,
        adapter: str | None = None,
        capacity: int | None = None,
        most_blocks: int = sys.maxsize,
    ) -> None:
        self.target = target
        self.adapter = adapter
        self.capacity = capacity
        self.most_blocks = most_blocks
        self.alive = True
        self.hybrid = False
        self.block_sizes: set[int] = set()
        self.counters = HoldingsCounters()
        self._tree = tree
        self._secret = secret
        self._holders: dict[tuple[int, str], Holder] = {}
        self._adapters_in_keys: set[str] = set()
        self._orphans = Orphans(orphan_blocks)
        self._early: dict[EngineHash, list[Holder]] = {}  # blocks of a window group that came before their prefix
        self._early_size = 0

    @property
    def orphans(self) -> int:
        """Blocks that wait for their parent."""
        return len(self._orphans)

    @property
    def whole_groups(self) -> set[int]:
        """The cache groups that need every block of a prefix."""
        return {holder.group for holder in self._holders.values() if holder.window is None}

    @property
    def windows(self) -> dict[int, int]:
        """How many of the last blocks the other cache groups need, by group."""
        return {holder.group: holder.window for holder in self._holders.values() if holder.window is not None}

    @property
    def shortest_window(self) -> int | None:
        """The fewest last blocks that any group keeps, of any tier; None where all keep a prefix whole."""
        return min((each.window for each in self._holders.values() if each.window is not None), default=None)

    def counting_groups(self, groups: Collection[int], seen: Collection[int]) -> set[int]:
        """Those of some cache groups that a hit needs: the model's, which are told of about as often as one another.

        `seen`: the groups that hold something of the prompt in question. A group that a stray event named is none.
        """
        told: dict[int, int] = {}
        for holder in self._holders.values():
            told[holder.group] = told.get(holder.group, 0) + holder.told
        most = max(told.values(), default=0)
        return {group for group in groups if told[group] * 8 >= most and (told[group] > 1 or group in seen)}

    def blocks_by_tier(self) -> dict[Tier, int]:
        """Blocks held in each tier; a block in two tiers counts in both, one in several groups once."""
        counts = dict.fromkeys(Tier, 0)
        for tier in Tier:
            in_groups: dict[int, int] = {}
            for holder in self._holders.values():
                if holder.tier is tier:
                    in_groups[holder.group] = in_groups.get(holder.group, 0) + len(holder.positions)
            counts[tier] = max(in_groups.values(), default=0)
        return counts

    def store(self, event: BlockStored) -> None:
        """Add the blocks of an event, or park it until its parent is known.

        Raises UnusableEventError; the holdings are then as before.
        """
        if len(event.block_hashes) == 1 and self._append(event):
            return
        if event.kv_cache_spec_kind not in _WHOLE_PREFIX_KINDS:
            self._store_window(event)
        elif not event.block_hashes:
            self.counters.ignored += 1
        elif not event.token_ids:
            self._store_known(event)
        elif not self._place(event):
            self.counters.orphans_dropped += self._orphans.park(Orphan(event))
        elif self._orphans:
            self._adopt(event.block_hashes)

    def remove(self, event: BlockRemoved) -> None:
        """Take away one copy of each block of an event."""
        holder = self._holders.get(_kind(event))
        for engine_hash in event.block_hashes:
            if holder is not None and engine_hash in holder.positions:
                if not _take_one(holder.extra_copies, engine_hash):
                    self.counters.removed += 1
                    self._vacate(holder, holder.positions.pop(engine_hash))
            elif not self._forget_early(holder, engine_hash):
                dropped = self._orphans.remove(engine_hash, event)
                if dropped is None:
                    self.counters.unknown_removed += 1
                else:
                    self.counters.orphans_dropped += dropped

    def clear_medium(self, medium: str) -> None:
        """Take away every block held in one medium, or parked for it."""
        for kind in [kind for kind in self._holders if kind[1] == medium]:
            holder = self._holders.pop(kind)
            while holder.positions:
                self._release_run(holder)
            self._early = {
                name: left for name, early in self._early.items() if (left := [h for h in early if h is not holder])
            }
            self._early_size = sum(map(len, self._early.values()))
        self._orphans.clear_medium(medium)

    def keep_within_capacity(self) -> None:
        """Drop the oldest blocks beyond what the engine's memory holds, or any engine's: their removal got lost."""
        holders = self._holders.values()
        if self.capacity is not None and not self.hybrid:
            for holder in holders:
                while holder.tier is Tier.GPU and (excess := len(holder.positions) - self.capacity) > 0:
                    self._drop_oldest(holder, excess)
        blocks = sum([len(holder.positions) for holder in holders])
        if blocks <= self.most_blocks:
            return
        kept = self.most_blocks - self.most_blocks // 16  # so that this is rare
        while blocks > kept:
            largest = max(holders, key=lambda holder: len(holder.positions))
            before = len(largest.positions)
            self._drop_oldest(largest, min(blocks - kept, before))
            blocks -= before - len(largest.positions)

    def dump(self) -> tuple[list[DumpedRun], list[DumpedHolder]]:
        """All blocks and the prefixes they end."""
        runs = self._tree.lineage(chain.from_iterable(holder.positions.values() for holder in self._holders.values()))
        places = {run.number: place for place, run in enumerate(runs)}
        dumped = []
        for run in runs:
            parent = run.parent
            assert parent is not None
            offset = run.depth - parent.depth - 1
            dumped.append(DumpedRun(places.get(parent.number, -1), offset, run.hashes.tolist()))
        holders = []
        for (group, medium), holder in self._holders.items():
            blocks = []
            for engine_hash, position in holder.positions.items():
                number, offset = split_position(position)
                blocks.append((written_hash(engine_hash), places[number], offset))
            copies = [(written_hash(engine_hash), count) for engine_hash, count in holder.extra_copies.items()]
            holders.append(DumpedHolder(group, medium, holder.window, blocks, copies))
        return dumped, holders

    def restore(self, runs: Sequence[DumpedRun], holders: Sequence[DumpedHolder]) -> None:
        """Hold what a dump says; these holdings must be empty. Raises DumpError when it makes no sense."""
        places: list[list[Place]] = []
        try:
            for dumped in runs:
                after = _place_at(places, dumped.parent, dumped.offset) if dumped.parent >= 0 else None
                spans = self._tree.insert(after, array("Q", dumped.hashes))
                places.append([(run, start + step) for run, start, count in spans for step in range(count)])
            for known in holders:
                holder = self._holder_of(known.group, known.medium)
                holder.window = known.window
                holder.told = min(len(known.blocks), 32)
                for name, number, offset in known.blocks:
                    self._hold_at(holder, read_hash(name), _place_at(places, number, offset))
                copies = {read_hash(name): count for name, count in known.copies}
                holder.extra_copies = {name: count for name, count in copies.items() if name in holder.positions}
        except (IndexError, OverflowError, UnusableEventError) as error:
            raise DumpError(f"a block of {self.target} has no place") from error
        finally:
            for run in {place[-1][0].number: place[-1][0] for place in reversed(places) if place}.values():
                self._tree.release(run)
        self.hybrid = len({holder.group for holder in self._holders.values()}) > 1 or bool(self.windows)

    def release_some(self, limit: int) -> bool:
        """Give back up to `limit` blocks to the tree; True when none is left. For holdings that are dropped whole."""
        for holder in self._holders.values():
            while holder.positions:
                if limit == 0:
                    return False
                limit -= 1
                self._release_run(holder)
        return True

    def _append(self, event: BlockStored) -> bool:
        """The commonest event by far, in the fewest steps: a new block behind the last one of its run.

        False, and nothing is done, when the event is anything else.
        """
        (engine_hash,) = event.block_hashes
        holder = self._holders.get((event.group_idx or 0, event.medium or "GPU"))
        if holder is None or event.kv_cache_spec_kind not in _WHOLE_PREFIX_KINDS:
            return False
        if event.extra_keys and any(event.extra_keys):
            return False
        positions = holder.positions
        parent = positions.get(event.parent_block_hash)  # type: ignore[arg-type]
        if parent is None or engine_hash in positions or self._orphans or self._early:
            return False
        run = self._tree.growing(parent)
        token_ids = event.token_ids
        if run is None or not token_ids or len(token_ids) != event.block_size:
            return False
        try:
            prefix_hash = xxh3_64_intdigest(pack_tokens(token_ids), run.hashes[-1])
        except (OverflowError, TypeError):
            return False
        run.held[holder] = run.held.get(holder, 0) | 1 << len(run.hashes)
        run.hashes.append(prefix_hash)
        positions[engine_hash] = parent + 1
        holder.told += 1
        self.counters.stored += 1
        return True

    def _place(self, event: BlockStored) -> bool:
        """Put an event's blocks into the tree; False when its parent is unknown."""
        engine_hashes = event.block_hashes
        parent = event.parent_block_hash
        tokens, block_size = self._blocks_of(event)
        keys: list[bytes | None] | None = None
        place: tuple[Run[Holder], int] | None = None
        if parent is None:
            seed, keys = self._start(event, block_size)
        else:
            place = self._find(parent, self._holders.get(_kind(event)))
            if place is None:
                return False
            seed = place[0].hashes[place[1]]
            if event.extra_keys and any(event.extra_keys):
                keys = self._identity(event)[2]
        holder = self._holder(event)
        hashes: array[int] = array("Q")
        extend_prefix_hashes(hashes, seed, tokens, block_size, len(engine_hashes), keys)
        left: list[int] = []
        done = 0
        recounts = self.hybrid or parent is not None or not _all_in(engine_hashes, holder.positions)
        for run, start, count in self._tree.insert(place, hashes):
            left += self._hold(holder, run, start, engine_hashes[done : done + count], recounts)
            done += count
        for position in left:
            self._vacate(holder, position)
        if self._early:
            self._hold_early(engine_hashes)
        return True

    def _start(self, event: BlockStored, block_size: int) -> tuple[int, list[bytes | None] | None]:
        """The seed and the extra keys of blocks that start a prompt."""
        adapter, salt, keys = self._identity(event)
        if block_size not in self.block_sizes:
            if len(self.block_sizes) >= _MOST_BLOCK_SIZES:
                raise UnusableEventError(f"block_size {block_size} is one more than {_MOST_BLOCK_SIZES}")
            self.block_sizes.add(block_size)
        in_keys = adapter is not None and event.lora_name is None and event.lora_id is None
        if adapter is not None and in_keys and len(self._adapters_in_keys) < _MOST_ADAPTERS_IN_KEYS:
            self._adapters_in_keys.add(adapter)
        target = self.target
        namespace = Namespace(target.model, target.tenant, adapter or self.adapter, salt, block_size)
        return namespace_hash(namespace, self._secret), keys

    def _identity(self, event: BlockStored) -> tuple[str | None, str | None, list[bytes | None] | None]:
        try:
            return identity_of(event, self._adapters_in_keys)
        except ValueError as error:
            raise UnusableEventError(str(error)) from error

    def _adopt(self, engine_hashes: Sequence[EngineHash]) -> None:
        """Place the orphans that waited for these blocks, and those that waited for them."""
        pending = self._orphans.adopt(engine_hashes)
        removals: list[tuple[Removal, int]] = []  # last, so that what hangs from a removed block finds its place
        while pending:
            orphan = pending.pop()
            try:
                placed = self._place(orphan.whole_event())
            except UnusableEventError:
                self.counters.orphans_dropped += len(orphan.event.block_hashes)
                continue
            if placed:
                removals += orphan.removals.items()
                pending += self._orphans.adopt(orphan.event.block_hashes)
        for (engine_hash, group, medium), times in removals:
            for _ in range(times):
                self.remove(BlockRemoved([engine_hash], medium, group))

    def _store_known(self, event: BlockStored) -> None:
        """An event without tokens: blocks that are known by now have one more copy, offloaded to another medium."""
        holder = self._holder(event)
        for engine_hash in event.block_hashes:
            place = self._find(engine_hash)
            if place is None:
                self.counters.orphans_dropped += 1
            else:
                self._hold_at(holder, engine_hash, place)

    def _store_window(self, event: BlockStored) -> None:
        """Blocks of a group that keeps only the last ones: their places are known from a whole-prefix group."""
        window = _window_blocks(event)
        known = self._holders.get(_kind(event))
        if window is None or (known is not None and known.window is None and known.positions):
            self.counters.ignored += 1
            return
        holder = self._holder(event)
        self.hybrid = True
        holder.window = window
        for engine_hash in event.block_hashes:
            place = self._find(engine_hash)
            if place is not None:
                self._hold_at(holder, engine_hash, place)
            elif self._early_size < self._orphans.limit:
                self._early.setdefault(engine_hash, []).append(holder)
                self._early_size += 1
            else:
                self.counters.orphans_dropped += 1

    def _hold_early(self, engine_hashes: Sequence[EngineHash]) -> None:
        for engine_hash in engine_hashes:
            early = self._early.pop(engine_hash, [])
            self._early_size -= len(early)
            for holder in early:
                place = self._find(engine_hash)
                assert place is not None, "a block that was just placed"
                self._hold_at(holder, engine_hash, place)

    def _forget_early(self, holder: Holder | None, engine_hash: EngineHash) -> bool:
        early = self._early.get(engine_hash)
        if holder is None or early is None or holder not in early:
            return False
        early.remove(holder)
        self._early_size -= 1
        if not early:
            del self._early[engine_hash]
        return True

    def _blocks_of(self, event: BlockStored) -> tuple[bytes, int]:
        """The packed tokens and the block size of an event."""
        count = len(event.block_hashes)
        if count > 1 and len(set(event.block_hashes)) != count:
            raise UnusableEventError("block_hashes names a block twice")
        block_size = event.block_size or len(event.token_ids) // count
        if block_size <= 0 or len(event.token_ids) != count * block_size:
            raise UnusableEventError(
                f"token_ids has {len(event.token_ids)} ids for {count} blocks of block_size {event.block_size}"
            )
        try:
            return pack_tokens(event.token_ids), block_size
        except (OverflowError, TypeError) as error:
            raise UnusableEventError("token_ids has an id that is no unsigned 32-bit number") from error

    def _hold_at(self, holder: Holder, engine_hash: EngineHash, place: tuple[Run[Holder], int]) -> None:
        for position in self._hold(holder, *place, [engine_hash], recounts=True):
            self._vacate(holder, position)

    def _hold(
        self, holder: Holder, run: Run[Holder], start: int, engine_hashes: Sequence[EngineHash], recounts: bool
    ) -> list[int]:
        """Mark blocks of a run, from `start` on, as held; one that is held already is another copy if `recounts`.

        Returns the places where the engine hashes were before, if not here.
        """
        count = len(engine_hashes)
        before = run.held.get(holder, 0)
        bits = ((1 << count) - 1) << start
        run.held[holder] = before | bits
        positions = holder.positions
        first = run.position(start)
        if not before & bits and positions.keys().isdisjoint(engine_hashes):
            positions.update(zip(engine_hashes, range(first, first + count), strict=True))
            self.counters.stored += count
            return []
        left: list[int] = []
        for position, engine_hash in enumerate(engine_hashes, first):
            known = positions.get(engine_hash)
            if known == position:
                if recounts:
                    holder.extra_copies[engine_hash] = holder.extra_copies.get(engine_hash, 0) + 1
                continue
            if known is None:
                self.counters.stored += 1
            else:
                left.append(known)
            positions[engine_hash] = position
            if before >> start + position - first & 1:
                holder.namesakes[position] = holder.namesakes.get(position, 0) + 1
        return left

    def _vacate(self, holder: Holder, position: int) -> None:
        """An engine hash is at a place no longer; with the last one the place is free."""
        if _take_one(holder.namesakes, position):
            return
        place = self._tree.find(position)
        assert place is not None, "a place that somebody holds"
        run, offset = place
        left = run.held.pop(holder) ^ 1 << offset
        if left:
            run.held[holder] = left
        if not left or offset == len(run.hashes) - 1:
            self._tree.release(run)

    def _drop_oldest(self, holder: Holder, limit: int) -> None:
        """Drop at least one and at most so many blocks, the oldest first, but none before those that follow it.

        So do engines evict: an old block that others follow is most likely in use.
        """
        passed: list[tuple[EngineHash, int]] = []
        dropped: list[EngineHash] = []
        for block in holder.positions.items():
            passed.append(block)
            while passed and len(dropped) < limit and self._is_end(holder, passed[-1][1]):
                engine_hash, position = passed.pop()
                self._vacate(holder, position)
                dropped.append(engine_hash)
            if len(dropped) == limit:
                break
        if not dropped:
            engine_hash, position = passed[0]
            self._vacate(holder, position)
            dropped.append(engine_hash)
        for engine_hash in dropped:
            del holder.positions[engine_hash]
            holder.extra_copies.pop(engine_hash, None)
        self.counters.over_capacity += len(dropped)

    def _is_end(self, holder: Holder, position: int) -> bool:
        """Whether no block that follows this one is held."""
        place = self._tree.find(position)
        assert place is not None, "a place that somebody holds"
        run, offset = place
        if run.held[holder] >> offset + 1 & 1:
            return False
        if len(run.children) > _CHILDREN_LOOKED_AT:
            return False  # what so much follows is in use
        behind = run.depth + offset + 1
        return not any(child.depth == behind and child.held.get(holder, 0) & 1 for child in run.children.values())

    def _release_run(self, holder: Holder) -> None:
        """Forget one block, and that its run is held, for a holder that is given up whole."""
        _, position = holder.positions.popitem()
        place = self._tree.find(position)
        if place is not None and place[0].held.pop(holder, 0):
            self._tree.release(place[0])

    def _find(self, engine_hash: EngineHash, first: Holder | None = None) -> tuple[Run[Holder], int] | None:
        """The place of a block that is held in any medium, in that of `first` if it is there."""
        for holder in chain((first,) if first else (), self._holders.values()):
            position = holder.positions.get(engine_hash)
            if position is not None:
                return self._tree.find(position)
        return None

    def _holder(self, event: BlockStored) -> Holder:
        """Who holds the blocks of a stored event."""
        holder = self._holder_of(*_kind(event))
        holder.told += 1
        return holder

    def _holder_of(self, group: int, medium: str) -> Holder:
        holder = self._holders.get((group, medium))
        if holder is None:
            if len(self._holders) >= _MOST_HOLDERS:
                raise UnusableEventError(f"more than {_MOST_HOLDERS} groups and media")
            holder = self._holders[group, medium] = Holder(self, group, tier_of(medium))
            self.hybrid = self.hybrid or len({known.group for known in self._holders.values()}) > 1
        return holder


def _kind(event: BlockStored | BlockRemoved) -> tuple[int, str]:
    """The cache group and the medium of an event; no medium is the engine's own memory."""
    return event.group_idx or 0, event.medium or "GPU"


def _place_at(places: list[list[Place]], number: int, offset: int) -> Place:
    """Where a block of a dump is. Raises IndexError."""
    if number < 0 or offset < 0:
        raise IndexError("counted from the end")
    return places[number][offset]


# Blocks. A longer window is as good as full attention, and is what a dump can hold.
_MOST_WINDOW = 2**31


def _window_blocks(event: BlockStored) -> int | None:
    """How many of the last blocks an event's group needs for a hit; None for a kind of group we do not know."""
    if event.kv_cache_spec_kind in _STATE_KINDS:
        return 1
    window = event.kv_cache_spec_sliding_window
    if event.kv_cache_spec_kind in _SLIDING_KINDS and window and event.block_size:
        return min(-(-(window - 1) // event.block_size), _MOST_WINDOW)
    return None


def _all_in(engine_hashes: Sequence[EngineHash], positions: dict[EngineHash, int]) -> bool:
    """Whether an event that starts a prompt only tells again of blocks that are held.

    An engine computes a second copy of a prompt's last block alone, which has a parent; a hybrid one of more.
    """
    return engine_hashes[0] in positions and all(engine_hash in positions for engine_hash in engine_hashes)


def _take_one(counts: dict[K, int], key: K) -> bool:
    """Lower a count that is there, forgetting it at 0; False when there is none."""
    count = counts.pop(key, 0)
    if count > 1:
        counts[key] = count - 1
    return count > 0
