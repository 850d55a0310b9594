"""What one target (a DP rank of a worker) holds: its blocks' places in the prefix tree, counted by group and medium."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from indexer.hashing import Namespace, extend_prefix_hashes, namespace_hash, pack_tokens
from indexer.tree import PrefixTree, Run, Span
from kvevents import BlockRemoved, BlockStored, EngineHash, Tier, tier_of
from kvevents.identity import identity_of

# Groups of these kinds (or of none) hold every block of a prefix; the others keep only a part of it.
_WHOLE_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Target:
    """One DP rank of one worker, serving one model for one tenant."""

    worker: str
    dp_rank: int
    model: str
    tenant: str = "default"


class UnusableEventError(ValueError):
    """An event that was read but makes no sense."""


@dataclass(eq=False, slots=True)
class Holder:
    """The blocks a target holds in one medium for one cache group: where in the tree each engine hash is."""

    owner: Holdings
    tier: Tier
    positions: dict[EngineHash, int] = field(default_factory=dict)
    # Engines may keep a block in several physical copies and report the removal of each: copies beyond the first.
    extra_copies: dict[EngineHash, int] = field(default_factory=dict)
    # An engine may tell blocks apart that are one to us: engine hashes beyond the first, by their place.
    namesakes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class HoldingsCounters:
    """What happened to a target's blocks since it was registered."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    unknown_removed: int = 0
    orphans_dropped: int = 0


@dataclass(slots=True)
class _Parked:
    """A stored event whose parent is not known yet, and what was removed of it since."""

    event: BlockStored
    removals: list[BlockRemoved] = field(default_factory=list)


class Holdings:
    """One target's blocks in the shared tree. `adapter` is the one of events that name none."""

    def __init__(
        self, tree: PrefixTree[Holder], target: Target, adapter: str | None, secret: str, orphan_blocks: int
    ) -> None:
        self.target = target
        self.adapter = adapter
        self.alive = True
        self.block_sizes: set[int] = set()
        self.counters = HoldingsCounters()
        self._tree = tree
        self._secret = secret
        self._holders: dict[tuple[int, str], Holder] = {}
        self._adapters_in_keys: set[str] = set()
        self._orphan_limit = orphan_blocks
        self._orphans: OrderedDict[EngineHash, list[_Parked]] = OrderedDict()  # by the missing parent
        self._orphan_blocks: dict[EngineHash, _Parked] = {}

    @property
    def orphans(self) -> int:
        """Blocks that wait for their parent."""
        return len(self._orphan_blocks)

    def blocks_by_tier(self) -> dict[Tier, int]:
        """Blocks held in each tier; a block in two tiers counts in both."""
        counts = dict.fromkeys(Tier, 0)
        for holder in self._holders.values():
            counts[holder.tier] += len(holder.positions)
        return counts

    def store(self, event: BlockStored) -> None:
        """Add the blocks of an event, or park it until its parent is known.

        Raises UnusableEventError; the holdings are then as before.
        """
        if event.kv_cache_spec_kind not in _WHOLE_PREFIX_KINDS or not event.block_hashes:
            return
        if not event.token_ids:
            self._store_known(event)
            return
        pending = [_Parked(event)]
        removals: list[BlockRemoved] = []  # last, so that what hangs from a removed block finds its place
        while pending:
            parked = pending.pop()
            if self._place(parked.event):
                removals += parked.removals
                for engine_hash in parked.event.block_hashes:
                    pending.extend(self._unpark(engine_hash))
        for removal in removals:
            self.remove(removal)

    def remove(self, event: BlockRemoved) -> None:
        """Take away one copy of each block of an event."""
        holder = self._holders.get(_kind(event))
        for engine_hash in event.block_hashes:
            if holder is not None and engine_hash in holder.positions:
                self._drop_copy(holder, engine_hash)
            elif parked := self._orphan_blocks.get(engine_hash):
                parked.removals.append(BlockRemoved([engine_hash], event.medium, event.group_idx))
            else:
                self.counters.unknown_removed += 1

    def clear_medium(self, medium: str) -> None:
        """Take away every block held in one medium, or parked for it."""
        for kind in [kind for kind in self._holders if kind[1] == medium]:
            holder = self._holders.pop(kind)
            while holder.positions:
                self._release_run(holder)
        for parent, waiting in list(self._orphans.items()):
            if any(_kind(parked.event)[1] == medium for parked in waiting):
                for parked in self._unpark(parent):
                    if _kind(parked.event)[1] != medium:
                        self._park(parked)

    def release_some(self, limit: int) -> bool:
        """Give back up to `limit` blocks to the tree; True when none is left. For holdings that are dropped whole."""
        for holder in self._holders.values():
            while holder.positions:
                if limit == 0:
                    return False
                limit -= 1
                self._release_run(holder)
        return True

    def _place(self, event: BlockStored) -> bool:
        """Put an event's blocks into the tree; False when its parent is unknown and it was parked."""
        tokens, block_size = self._blocks_of(event)
        try:
            adapter, salt, keys = identity_of(event, self._adapters_in_keys)
        except ValueError as error:
            raise UnusableEventError(str(error)) from error
        after: tuple[Run[Holder], int] | None
        if event.parent_block_hash is None:
            after = None
            self.block_sizes.add(block_size)
            if adapter is not None and event.lora_name is None and event.lora_id is None:
                self._adapters_in_keys.add(adapter)
            target = self.target
            namespace = Namespace(target.model, target.tenant, adapter or self.adapter, salt, block_size)
            seed = namespace_hash(namespace, self._secret)
        else:
            after = self._find(event.parent_block_hash)
            if after is None:
                self._park(_Parked(event))
                return False
            run, offset = after
            seed = run.hashes[offset]
        hashes: array[int] = array("Q")
        extend_prefix_hashes(hashes, seed, tokens, block_size, len(event.block_hashes), keys)
        holder = self._holder(event)
        left: list[int] = []
        done = 0
        for span in self._tree.insert(after, hashes):
            left += self._hold(holder, span, event.block_hashes[done : done + span.count])
            done += span.count
        for position in left:
            self._vacate(holder, position)
        return True

    def _store_known(self, event: BlockStored) -> None:
        """An event without tokens: blocks that are known by now have one more copy, offloaded to another medium."""
        holder = self._holder(event)
        for engine_hash in event.block_hashes:
            place = self._find(engine_hash)
            if place is None:
                self.counters.orphans_dropped += 1
                continue
            for position in self._hold(holder, Span(*place, 1), [engine_hash]):
                self._vacate(holder, position)

    def _blocks_of(self, event: BlockStored) -> tuple[bytes, int]:
        """The packed tokens and the block size of an event."""
        count = len(event.block_hashes)
        if len(set(event.block_hashes)) != count:
            raise UnusableEventError("block_hashes names a block twice")
        block_size = event.block_size or len(event.token_ids) // count
        if block_size <= 0 or len(event.token_ids) != count * block_size:
            raise UnusableEventError(
                f"token_ids has {len(event.token_ids)} ids for {count} blocks of block_size {event.block_size}"
            )
        try:
            return pack_tokens(event.token_ids), block_size
        except (OverflowError, TypeError) as error:
            raise UnusableEventError(f"token_ids has an id that is no unsigned 32-bit number: {error}") from error

    def _hold(self, holder: Holder, span: Span[Holder], engine_hashes: Sequence[EngineHash]) -> list[int]:
        """Mark a span as held. Returns the places where its engine hashes were before, if not here."""
        before = span.run.held.get(holder, 0)
        span.run.held[holder] = before | span.bits
        places = zip(engine_hashes, span.positions, strict=True)
        if not before & span.bits and holder.positions.keys().isdisjoint(engine_hashes):
            holder.positions.update(places)
            self.counters.stored += span.count
            return []
        left: list[int] = []
        for offset, (engine_hash, position) in enumerate(places, span.start):
            known = holder.positions.get(engine_hash)
            if known == position:
                holder.extra_copies[engine_hash] = holder.extra_copies.get(engine_hash, 0) + 1
                continue
            if known is None:
                self.counters.stored += 1
            else:
                left.append(known)
            holder.positions[engine_hash] = position
            if before >> offset & 1:
                holder.namesakes[position] = holder.namesakes.get(position, 0) + 1
        return left

    def _drop_copy(self, holder: Holder, engine_hash: EngineHash) -> None:
        if not _take_one(holder.extra_copies, engine_hash):
            self.counters.removed += 1
            self._vacate(holder, holder.positions.pop(engine_hash))

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

    def _release_run(self, holder: Holder) -> None:
        """Forget one block, and that its run is held, for a holder that is given up whole."""
        _, position = holder.positions.popitem()
        place = self._tree.find(position)
        if place is not None and place[0].held.pop(holder, 0):
            self._tree.release(place[0])

    def _find(self, engine_hash: EngineHash) -> tuple[Run[Holder], int] | None:
        """The place of a block that is held in any medium."""
        for holder in self._holders.values():
            position = holder.positions.get(engine_hash)
            if position is not None:
                return self._tree.find(position)
        return None

    def _park(self, parked: _Parked) -> None:
        """Keep an event until its parent comes; the oldest ones go when there are too many."""
        parent = parked.event.parent_block_hash
        assert parent is not None
        self._orphans.setdefault(parent, []).append(parked)
        self._orphan_blocks.update(dict.fromkeys(parked.event.block_hashes, parked))
        while len(self._orphan_blocks) > self._orphan_limit:
            oldest = next(iter(self._orphans))
            self.counters.orphans_dropped += sum(len(dropped.event.block_hashes) for dropped in self._unpark(oldest))

    def _unpark(self, parent: EngineHash) -> list[_Parked]:
        """The events that wait for a parent, which are not kept any longer."""
        waiting = self._orphans.pop(parent, [])
        for parked in waiting:
            for engine_hash in parked.event.block_hashes:
                if self._orphan_blocks.get(engine_hash) is parked:
                    del self._orphan_blocks[engine_hash]
        return waiting

    def _holder(self, event: BlockStored) -> Holder:
        kind = _kind(event)
        holder = self._holders.get(kind)
        if holder is None:
            holder = self._holders[kind] = Holder(self, tier_of(event.medium))
        return holder


def _kind(event: BlockStored | BlockRemoved) -> tuple[int, str]:
    """The cache group and the medium of an event; no medium is the engine's own memory."""
    return event.group_idx or 0, event.medium or "GPU"


def _take_one(counts: dict[K, int], key: K) -> bool:
    """Lower a count that is there, forgetting it at 0; False when there is none."""
    count = counts.pop(key, 0)
    if count > 1:
        counts[key] = count - 1
    return count > 0
