"""Holdings of one target: the positions of its blocks in the prefix tree, by cache group and medium.

One file, because it is the specification that the native index is compared with: the effect of each event on a target.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias, TypeVar

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from indexer.dump import DumpedHolder, DumpedRun, DumpError, read_hash, written_hash
from indexer.hashing import Namespace, extend_prefix_hashes, namespace_hash, pack_tokens
from indexer.pools.blocks import PythonPoolBlocks
from indexer.reference.orphans import Orphan, Orphans, Removal
from indexer.reference.tree import PrefixTree, Run, split_position
from indexer.targets import HoldingsCounters, Target
from kvevents import BlockRemoved, BlockStored, EngineHash, Tier, tier_of
from kvevents.events import has_identity, identity_of

# Kinds of cache groups in hybrid models. Groups of these kinds hold every block of a prefix, and so identify it.
_WHOLE_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})
# Groups of these kinds hold only the blocks in reach of the last token.
_SLIDING_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
# Groups of these kinds hold only the state after a block.
_STATE_KINDS = frozenset({"mamba", "linear_attention"})

# Limits of one stream, for things of which an engine has few. `indexer/native/holdings.hpp` has the same limits.
_MOST_HOLDERS = 64
_MOST_BLOCK_SIZES = 8
_MOST_ADAPTERS_IN_KEYS = 1024

# A run with more children than this is assumed to have a held one. `indexer/native/tree.hpp` has the same limit.
_CHILDREN_CHECKED = 64

K = TypeVar("K")


class UnusableEventError(ValueError):
    """An event that is readable but invalid."""


@dataclass(eq=False, slots=True)
class Holder:
    """The blocks that a target holds in one medium for one cache group.

    - `window`: number of last blocks that a hit needs; None if a hit needs every block of a prefix.
    - `reach`: the tokens before the last one that a hit needs, from which `window` is computed; 0 if it is not.
    - `evicts`: whether a block was removed from it.
    - `extra_copies`: copies beyond the first, by engine hash. Engines may keep several physical copies of a block, and
      report the removal of each.
    - `namesakes`: engine hashes beyond the first, by position. An engine may distinguish blocks that are equal here.
    """

    owner: Holdings
    group: int
    tier: Tier
    window: int | None = None
    reach: int = 0
    stored_events: int = 0
    evicts: bool = False
    positions: dict[EngineHash, int] = field(default_factory=dict)
    extra_copies: dict[EngineHash, int] = field(default_factory=dict)
    namesakes: dict[int, int] = field(default_factory=dict)

    def holds(self, engine_hash: EngineHash, early: dict[EngineHash, list[Holder]]) -> bool:
        """Return whether it has a copy of a block. `early`: the holders of blocks stored before their prefix."""
        return engine_hash in self.positions or self in early.get(engine_hash, ())


# A run and the offset of a block in it.
Place: TypeAlias = tuple[Run[Holder], int]


class Holdings:
    """Blocks of one target in the shared tree. `adapter`: the LoRA of events that name none."""

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
        self.pool: PythonPoolBlocks | None = None  # the pool that the target can load from
        self.alive = True
        self.hybrid = False
        self.block_sizes: set[int] = set()
        self.counters = HoldingsCounters()
        self._tree = tree
        self._secret = secret
        self._holders: dict[tuple[int, str], Holder] = {}
        self._adapters_in_keys: set[str] = set()
        self._orphans = Orphans(orphan_blocks)
        self._early: dict[EngineHash, list[Holder]] = {}  # blocks of window groups that were stored before their prefix
        self._early_size = 0

    @property
    def orphans(self) -> int:
        """Number of blocks that wait for their parent."""
        return len(self._orphans)

    @property
    def whole_groups(self) -> set[int]:
        """Cache groups whose hits need every block of a prefix."""
        return {holder.group for holder in self._holders.values() if holder.window is None}

    @property
    def windows(self) -> dict[int, int]:
        """Number of last blocks that a hit needs, for the other cache groups."""
        return {holder.group: holder.window for holder in self._holders.values() if holder.window is not None}

    @property
    def shortest_window(self) -> int | None:
        """The fewest last blocks that any group keeps, in any tier; None if every group keeps whole prefixes."""
        return min((each.window for each in self._holders.values() if each.window is not None), default=None)

    def counting_groups(self, groups: Collection[int], seen: Collection[int]) -> set[int]:
        """Return those of some cache groups that belong to the model, and so are needed for a hit.

        The groups of a model have about equally many stored events. A group with far fewer comes from a stray event.
        `seen` are the groups that hold a part of the prompt in question. One stored event is enough for a group that
        blocks were removed from.
        """
        events: dict[int, int] = {}
        known = {holder.group for holder in self._holders.values() if holder.evicts}.union(seen)
        for holder in self._holders.values():
            events[holder.group] = events.get(holder.group, 0) + holder.stored_events
        most = max(events.values(), default=0)
        return {group for group in groups if events[group] * 8 >= most and (events[group] > 1 or group in known)}

    def blocks_by_tier(self) -> dict[Tier, int]:
        """Return the number of blocks in each tier. A block in several cache groups of a tier counts once."""
        counts = dict.fromkeys(Tier, 0)
        for tier in Tier:
            in_groups: dict[int, int] = {}
            for holder in self._holders.values():
                if holder.tier is tier:
                    in_groups[holder.group] = in_groups.get(holder.group, 0) + len(holder.positions)
            counts[tier] = max(in_groups.values(), default=0)
        return counts

    def store(self, event: BlockStored) -> None:
        """Add the blocks of an event, once its parent is known. Raises UnusableEventError, with nothing changed."""
        if len(event.block_hashes) == 1 and self._append(event):
            return
        if event.kv_cache_spec_kind not in _WHOLE_PREFIX_KINDS:
            self._store_window(event)
        elif not event.block_hashes:
            self.counters.ignored += 1
        elif not event.token_ids or not has_identity(event):
            self._store_known(event)
        elif not self._place(event):
            self.counters.orphans_dropped += self._orphans.park(Orphan(event))
        elif self._orphans:
            self._adopt(event.block_hashes)

    def remove(self, event: BlockRemoved) -> None:
        """Remove one copy of each block of an event."""
        holder = self._holders.get(_kind(event))
        for engine_hash in event.block_hashes:
            if holder is not None and engine_hash in holder.positions:
                if not _take_one(holder.extra_copies, engine_hash):
                    self.counters.removed += 1
                    holder.evicts = True
                    self._vacate(holder, holder.positions.pop(engine_hash))
            elif not self._forget_early(holder, engine_hash):
                self._remove_waiting(engine_hash, event, 1)

    def _remove_waiting(self, engine_hash: EngineHash, event: BlockRemoved, times: int) -> None:
        """Remove copies of a block that is not held. It costs the same for any number of `times`."""
        dropped = self._orphans.remove(engine_hash, event, times)
        if dropped is None:
            self.counters.unknown_removed += times
        else:
            self.counters.orphans_dropped += dropped

    def clear_medium(self, medium: str) -> None:
        """Remove every block in one medium, and the orphans of that medium."""
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
        """Drop the oldest blocks beyond the capacity of the engine, or of any engine: their removal was lost."""
        holders = self._holders.values()
        if self.capacity is not None and not self.hybrid:
            for holder in holders:
                while holder.tier is Tier.GPU and (excess := len(holder.positions) - self.capacity) > 0:
                    self._drop_oldest(holder, excess)
        blocks = sum([len(holder.positions) for holder in holders])
        if blocks <= self.most_blocks:
            return
        kept = self.most_blocks - self.most_blocks // 16  # a margin, so that this is rare
        while blocks > kept:
            largest = max(holders, key=lambda holder: len(holder.positions))
            before = len(largest.positions)
            self._drop_oldest(largest, min(blocks - kept, before))
            blocks -= before - len(largest.positions)

    def dump(self) -> tuple[list[DumpedRun], list[DumpedHolder]]:
        """Return all blocks in the form of a dump, with the runs of their prefixes."""
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
        """Add the blocks of a dump to empty holdings. Raises DumpError for an invalid dump."""
        places: list[list[Place]] = []
        try:
            for dumped in runs:
                after = _place_at(places, dumped.parent, dumped.offset) if dumped.parent >= 0 else None
                spans = self._tree.insert(after, array("Q", dumped.hashes))
                places.append([(run, start + step) for run, start, count in spans for step in range(count)])
            for known in holders:
                holder = self._holder_of(known.group, known.medium)
                holder.window = known.window
                holder.stored_events = min(len(known.blocks), 32)
                for name, number, offset in known.blocks:
                    self._hold_at(holder, read_hash(name), _place_at(places, number, offset))
                copies = {read_hash(name): count for name, count in known.copies}
                holder.extra_copies = {name: count for name, count in copies.items() if name in holder.positions}
        except (IndexError, OverflowError, UnusableEventError) as error:
            raise DumpError(f"a block of {self.target} is outside its runs") from error
        finally:
            for run in {place[-1][0].number: place[-1][0] for place in reversed(places) if place}.values():
                self._tree.release(run)
        self.hybrid = len({holder.group for holder in self._holders.values()}) > 1 or bool(self.windows)

    def release_some(self, limit: int) -> bool:
        """Free up to `limit` blocks of dropped holdings. Returns True if none is left."""
        for holder in self._holders.values():
            while holder.positions:
                if limit == 0:
                    return False
                limit -= 1
                self._release_run(holder)
        return True

    def _append(self, event: BlockStored) -> bool:
        """Append a new block to the last one of its run: the most frequent event. Return False for another event."""
        (engine_hash,) = event.block_hashes
        holder = self._holders.get((event.group_idx or 0, event.medium or "GPU"))
        if holder is None or event.kv_cache_spec_kind not in _WHOLE_PREFIX_KINDS:
            return False
        if (event.extra_keys and any(event.extra_keys)) or not has_identity(event):
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
        if self.pool is not None:
            self.pool.learn(array("Q", [prefix_hash]), event.block_hashes)
        holder.stored_events += 1
        self.counters.stored += 1
        return True

    def _place(self, event: BlockStored) -> bool:
        """Add an event's blocks to the tree. Returns False if its parent is unknown."""
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
                # Some publishers write 0 for the parent of a first block.
                return parent == 0 and self._place(replace(event, parent_block_hash=None))
            seed = place[0].hashes[place[1]]
            if event.extra_keys and any(event.extra_keys):
                keys = self._identity(event)[2]
        holder = self._holder(event)
        hashes: array[int] = array("Q")
        extend_prefix_hashes(hashes, seed, tokens, block_size, len(engine_hashes), keys)
        if self.pool is not None:
            self.pool.learn(hashes, engine_hashes)
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
        adapter, salt, keys = self._identity(event)
        if block_size not in self.block_sizes:
            if len(self.block_sizes) >= _MOST_BLOCK_SIZES:
                raise UnusableEventError(
                    f"block_size {block_size} is new, and the target has {_MOST_BLOCK_SIZES} already"
                )
            self.block_sizes.add(block_size)
            for holder in self._holders.values():
                if holder.window is not None and holder.reach:
                    holder.window = min(holder.window, -(-holder.reach // block_size))
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
        """Add the orphans whose parents are these blocks, and the orphans whose parents are those."""
        pending = self._orphans.adopt(engine_hashes)
        removals: list[tuple[Removal, int]] = []  # applied last, so that children of a removed block find their parent
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
            event = BlockRemoved([engine_hash], medium, group)
            holder = self._holders.get(_kind(event))
            while times and holder is not None and holder.holds(engine_hash, self._early):
                self.remove(event)
                times -= 1
            if times:
                self._remove_waiting(engine_hash, event, times)

    def _store_known(self, event: BlockStored) -> None:
        """Add copies of known blocks by their hashes, from an event that has no tokens or not the whole identity."""
        holder = self._holder(event)
        for engine_hash in event.block_hashes:
            place = self._find(engine_hash)
            if place is None:
                self.counters.orphans_dropped += 1
            else:
                self._hold_at(holder, engine_hash, place)

    def _store_window(self, event: BlockStored) -> None:
        """Add blocks of a sliding-window group. Their positions come from the full-attention group.

        The group's blocks may be smaller than those of whole prefixes. The engine's hash of a block names everything
        before its end. So a block that ends where a block of a whole prefix ends has the same hash, and the others have
        no position. A hit ends with a block of a whole prefix, and needs as many of these as the window reaches into.
        """
        window = _window_blocks(event, max(self.block_sizes, default=0))
        known = self._holders.get(_kind(event))
        if window is None or (known is not None and known.window is None and known.positions):
            self.counters.ignored += 1
            return
        holder = self._holder(event)
        self.hybrid = True
        holder.window, holder.reach = window, _reach(event)
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
                assert place is not None, "the block was just added"
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
        count = len(event.block_hashes)
        if count > 1 and len(set(event.block_hashes)) != count:
            raise UnusableEventError("block_hashes has a duplicate")
        block_size = event.block_size or len(event.token_ids) // count
        if block_size <= 0 or len(event.token_ids) != count * block_size:
            raise UnusableEventError(
                f"token_ids has {len(event.token_ids)} ids for {count} blocks of block_size {event.block_size}"
            )
        try:
            return pack_tokens(event.token_ids), block_size
        except (OverflowError, TypeError) as error:
            raise UnusableEventError("token_ids has an id that is not an unsigned 32-bit integer") from error

    def _hold_at(self, holder: Holder, engine_hash: EngineHash, place: tuple[Run[Holder], int]) -> None:
        for position in self._hold(holder, *place, [engine_hash], recounts=True):
            self._vacate(holder, position)

    def _hold(
        self, holder: Holder, run: Run[Holder], start: int, engine_hashes: Sequence[EngineHash], recounts: bool
    ) -> list[int]:
        """Mark blocks of a run, from `start` on, as held. If `recounts`, blocks that are held count as another copy.

        Returns the former positions of the engine hashes that were elsewhere.
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
        """Remove an engine hash from a position. With its last engine hash, the holder no longer holds the position."""
        if _take_one(holder.namesakes, position):
            return
        place = self._tree.find(position)
        assert place is not None, "a held position is in the tree"
        run, offset = place
        left = run.held.pop(holder) ^ 1 << offset
        if left:
            run.held[holder] = left
        if not left or offset == len(run.hashes) - 1:
            self._tree.release(run)

    def _drop_oldest(self, holder: Holder, limit: int) -> None:
        """Drop 1 to `limit` blocks as engines evict: the oldest first, but each block after its children."""
        kept: list[tuple[EngineHash, int]] = []
        dropped: list[EngineHash] = []
        for block in holder.positions.items():
            kept.append(block)
            while kept and len(dropped) < limit and self._is_end(holder, kept[-1][1]):
                engine_hash, position = kept.pop()
                self._vacate(holder, position)
                dropped.append(engine_hash)
            if len(dropped) == limit:
                break
        if not dropped:
            engine_hash, position = kept[0]
            self._vacate(holder, position)
            dropped.append(engine_hash)
        for engine_hash in dropped:
            del holder.positions[engine_hash]
            holder.extra_copies.pop(engine_hash, None)
        self.counters.over_capacity += len(dropped)

    def _is_end(self, holder: Holder, position: int) -> bool:
        place = self._tree.find(position)
        assert place is not None, "a held position is in the tree"
        run, offset = place
        if run.held[holder] >> offset + 1 & 1:
            return False
        if len(run.children) > _CHILDREN_CHECKED:
            return False  # a block with this many children is in use
        behind = run.depth + offset + 1
        return not any(child.depth == behind and child.held.get(holder, 0) & 1 for child in run.children.values())

    def _release_run(self, holder: Holder) -> None:
        """Remove one block, and the holder's bits in its run, for a holder that is dropped as a whole."""
        _, position = holder.positions.popitem()
        place = self._tree.find(position)
        if place is not None and place[0].held.pop(holder, 0):
            self._tree.release(place[0])

    def _find(self, engine_hash: EngineHash, first: Holder | None = None) -> tuple[Run[Holder], int] | None:
        """Return the place of a block in any medium; in the medium of `first` if the block is there."""
        for holder in chain((first,) if first else (), self._holders.values()):
            position = holder.positions.get(engine_hash)
            if position is not None:
                return self._tree.find(position)
        return None

    def _holder(self, event: BlockStored) -> Holder:
        holder = self._holder_of(*_kind(event))
        holder.stored_events += 1
        return holder

    def _holder_of(self, group: int, medium: str) -> Holder:
        holder = self._holders.get((group, medium))
        if holder is None:
            if len(self._holders) >= _MOST_HOLDERS:
                raise UnusableEventError(f"more than {_MOST_HOLDERS} combinations of cache group and medium")
            holder = self._holders[group, medium] = Holder(self, group, tier_of(medium))
            self.hybrid = self.hybrid or len({known.group for known in self._holders.values()}) > 1
        return holder


def _kind(event: BlockStored | BlockRemoved) -> tuple[int, str]:
    """Return the cache group and the medium of an event. An event without medium is about the engine's own memory."""
    return event.group_idx or 0, event.medium or "GPU"


def _place_at(places: list[list[Place]], number: int, offset: int) -> Place:
    """Return the place of a block of a dump. Raises IndexError if the dump has no block there."""
    if number < 0 or offset < 0:
        raise IndexError("negative run or offset")  # Python would count from the end
    return places[number][offset]


# Maximum window in blocks. A longer one is equivalent to full attention, and does not fit into a dump.
_MOST_WINDOW = 2**31


def _window_blocks(event: BlockStored, whole: int) -> int | None:
    """Return the number of last blocks that a hit needs in an event's group; None for an unknown kind of group.

    `whole`: the block size of whole prefixes; 0 if it is not known yet.
    """
    if event.kv_cache_spec_kind in _STATE_KINDS:
        return 1
    window = event.kv_cache_spec_sliding_window
    if event.kv_cache_spec_kind in _SLIDING_KINDS and window and event.block_size > 0:
        return min(-(-(window - 1) // max(event.block_size, whole)), _MOST_WINDOW)
    return None


def _reach(event: BlockStored) -> int:
    """Return the tokens before the last one that a hit needs in an event's window group; 0 for other groups."""
    return max((event.kv_cache_spec_sliding_window or 1) - 1, 0) if event.kv_cache_spec_kind in _SLIDING_KINDS else 0


def _all_in(engine_hashes: Sequence[EngineHash], positions: dict[EngineHash, int]) -> bool:
    """Return whether an event that starts a prompt only repeats blocks that are held, and so is no second copy.

    An engine computes a second copy only of a prompt's last block, which has a parent. With a hybrid model it may
    compute more.
    """
    return engine_hashes[0] in positions and all(engine_hash in positions for engine_hash in engine_hashes)


def _take_one(counts: dict[K, int], key: K) -> bool:
    """Decrease a count by one, and remove it at 0. Returns False if `counts` has no count for `key`."""
    count = counts.pop(key, 0)
    if count > 1:
        counts[key] = count - 1
    return count > 0
