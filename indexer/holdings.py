"""What one target (a DP rank of a worker) holds: its blocks' places in the prefix tree, counted by group and medium."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from indexer.hashing import Namespace, extend_prefix_hashes, namespace_hash, pack_tokens
from indexer.tree import PrefixTree, Run, Span
from kvevents import BlockRemoved, BlockStored, EngineHash, Tier, tier_of
from kvevents.identity import identity_of

# Groups of these kinds (or of none) hold every block of a prefix; the others keep only a part of it.
_WHOLE_PREFIX_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention"})


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
    """The blocks a target holds in one medium for one cache group."""

    owner: Holdings
    tier: Tier
    blocks: int = 0
    # Engines may keep a block in several physical copies and report the removal of each: copies beyond the first.
    extra_copies: dict[int, int] = field(default_factory=dict)


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
        self._positions: dict[EngineHash, int] = {}
        self._holders: dict[tuple[int, str | None], Holder] = {}
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
            counts[holder.tier] += holder.blocks
        return counts

    def store(self, event: BlockStored) -> None:
        """Add the blocks of an event, or park it until its parent is known.

        Raises UnusableEventError; the holdings are then as before.
        """
        if event.kv_cache_spec_kind not in _WHOLE_PREFIX_KINDS or not event.block_hashes:
            return
        pending = [_Parked(event)]
        while pending:
            parked = pending.pop()
            if not self._place(parked.event):
                continue
            for removal in parked.removals:
                self.remove(removal)
            for engine_hash in parked.event.block_hashes:
                pending.extend(self._unpark(engine_hash))

    def remove(self, event: BlockRemoved) -> None:
        """Take away one copy of each block of an event."""
        holder = self._holders.get((event.group_idx or 0, event.medium))
        for engine_hash in event.block_hashes:
            position = self._positions.get(engine_hash)
            if position is not None and holder is not None:
                self._drop_copy(holder, engine_hash, position)
            elif parked := self._orphan_blocks.get(engine_hash):
                parked.removals.append(BlockRemoved([engine_hash], event.medium, event.group_idx))
            else:
                self.counters.unknown_removed += 1

    def clear_medium(self, medium: str) -> None:
        """Take away every block held in one medium."""
        gone = [holder for (_, name), holder in self._holders.items() if name == medium]
        kept = [holder for (_, name), holder in self._holders.items() if name != medium]
        self._holders = {key: holder for key, holder in self._holders.items() if key[1] != medium}
        positions: dict[EngineHash, int] = {}
        touched: dict[int, Run[Holder]] = {}
        for engine_hash, position in self._positions.items():
            place = self._tree.find(position)
            if place is None:
                continue
            run, offset = place
            touched[run.number] = run
            if any(run.held.get(holder, 0) >> offset & 1 for holder in kept):
                positions[engine_hash] = position
        self._positions = positions
        for run in touched.values():
            for holder in gone:
                run.held.pop(holder, None)
            self._tree.release(run)

    def release_some(self, limit: int) -> bool:
        """Give back up to `limit` blocks to the tree; True when none is left. For holdings that are dropped whole."""
        for _ in range(limit):
            if not self._positions:
                self._holders.clear()
                return True
            _, position = self._positions.popitem()
            place = self._tree.find(position)
            if place is None:
                continue
            run, _ = place
            mine = [holder for holder in self._holders.values() if run.held.pop(holder, 0)]
            if mine:
                self._tree.release(run)
        return not self._positions

    def _place(self, event: BlockStored) -> bool:
        """Put an event's blocks into the tree; False when its parent is unknown and it was parked."""
        tokens, block_size = self._blocks_of(event)
        try:
            adapter, salt, keys = identity_of(event)
        except ValueError as error:
            raise UnusableEventError(str(error)) from error
        after: tuple[Run[Holder], int] | None
        if event.parent_block_hash is None:
            after = None
            self.block_sizes.add(block_size)
            target = self.target
            namespace = Namespace(target.model, target.tenant, adapter or self.adapter, salt, block_size)
            seed = namespace_hash(namespace, self._secret)
        else:
            position = self._positions.get(event.parent_block_hash)
            after = None if position is None else self._tree.find(position)
            if after is None:
                self._park(event)
                return False
            run, offset = after
            seed = run.hashes[offset]
        hashes: array[int] = array("Q")
        extend_prefix_hashes(hashes, seed, tokens, block_size, len(event.block_hashes), keys)
        holder = self._holder(event.group_idx or 0, event.medium)
        done = 0
        for span in self._tree.insert(after, hashes):
            self._hold(holder, span, event.block_hashes[done : done + span.count])
            done += span.count
        return True

    def _blocks_of(self, event: BlockStored) -> tuple[bytes, int]:
        """The packed tokens and the block size of an event."""
        count = len(event.block_hashes)
        block_size = event.block_size or len(event.token_ids) // count
        if block_size <= 0 or len(event.token_ids) != count * block_size:
            raise UnusableEventError(
                f"token_ids has {len(event.token_ids)} ids for {count} blocks of block_size {event.block_size}"
            )
        try:
            return pack_tokens(event.token_ids), block_size
        except (OverflowError, TypeError) as error:
            raise UnusableEventError(f"token_ids has an id that is no unsigned 32-bit number: {error}") from error

    def _hold(self, holder: Holder, span: Span[Holder], engine_hashes: Sequence[EngineHash]) -> None:
        before = span.run.held.get(holder, 0)
        bits = span.bits
        again = before & bits
        span.run.held[holder] = before | bits
        self._positions.update(zip(engine_hashes, span.positions, strict=True))
        new = span.count - again.bit_count()
        holder.blocks += new
        self.counters.stored += new
        while again:
            lowest = again & -again
            position = span.run.position(lowest.bit_length() - 1)
            holder.extra_copies[position] = holder.extra_copies.get(position, 0) + 1
            again ^= lowest

    def _drop_copy(self, holder: Holder, engine_hash: EngineHash, position: int) -> None:
        copies = holder.extra_copies.get(position)
        if copies is None:
            self._drop(holder, engine_hash, position)
        elif copies == 1:
            del holder.extra_copies[position]
        else:
            holder.extra_copies[position] = copies - 1

    def _drop(self, holder: Holder, engine_hash: EngineHash, position: int) -> None:
        place = self._tree.find(position)
        if place is None:
            del self._positions[engine_hash]
            return
        run, offset = place
        bit = 1 << offset
        held = run.held.get(holder, 0)
        if not held & bit:
            self.counters.unknown_removed += 1
            return
        if held == bit:
            del run.held[holder]
        else:
            run.held[holder] = held ^ bit
        holder.blocks -= 1
        self.counters.removed += 1
        if not any(run.held.get(other, 0) & bit for other in self._holders.values()):
            del self._positions[engine_hash]
        if held == bit or offset == len(run.hashes) - 1:
            self._tree.release(run)

    def _park(self, event: BlockStored) -> None:
        """Keep an event until its parent comes; the oldest ones go when there are too many."""
        assert event.parent_block_hash is not None
        parked = _Parked(event)
        self._orphans.setdefault(event.parent_block_hash, []).append(parked)
        self._orphan_blocks.update(dict.fromkeys(event.block_hashes, parked))
        while len(self._orphan_blocks) > self._orphan_limit:
            oldest = next(iter(self._orphans))
            self.counters.orphans_dropped += sum(len(dropped.event.block_hashes) for dropped in self._unpark(oldest))

    def _unpark(self, parent: EngineHash) -> list[_Parked]:
        """The events that wait for a parent, which are not kept any longer."""
        waiting = self._orphans.pop(parent, [])
        for parked in waiting:
            for engine_hash in parked.event.block_hashes:
                self._orphan_blocks.pop(engine_hash, None)
        return waiting

    def _holder(self, group: int, medium: str | None) -> Holder:
        holder = self._holders.get((group, medium))
        if holder is None:
            holder = self._holders[group, medium] = Holder(self, tier_of(medium))
        return holder
