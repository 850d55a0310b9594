"""The index in C++: it applies the payloads of stream frames without Python's lock.

The C++ code reads the most frequent dialects. `kvevents` decodes the events that the C++ code cannot read: malformed
events, and those of a rare dialect. They are then applied in vLLM's dialect.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import partial
from struct import Struct
from typing import TypeAlias

import msgspec

from indexer._native import Index as NativeCore
from indexer._native import LiveReader, choose_target
from indexer.dump import DumpedHolder, DumpedRun, DumpError, TargetDump
from indexer.hashing import PackedPrompt
from indexer.index import (
    MOST_BLOCKS,
    ORPHAN_BLOCKS,
    Applied,
    ChoiceQuestion,
    ChosenRows,
    Index,
    Match,
    RowMatches,
    TargetRows,
    TargetStatus,
    apply_and_report,
)
from indexer.pools.blocks import NativePoolBlocks, PoolBlocks
from indexer.targets import HoldingsCounters, Target
from kvevents import EventBatch, RejectedEvent, Tier, decode_batch
from kvevents.batches import decode_event

# Result of applying a batch, if something in it needs Python:
# - whether the payload is an event batch
# - whether it cleared the cache
# - whether it has a new block size
# - the number and the reason of each invalid event
# - the number and the bytes of each event in an unknown dialect
Outcome: TypeAlias = tuple[bool, bool, bool, list[tuple[int, str]], list[tuple[int, bytes]]]
_CLEARED, _NEW_BLOCK_SIZE = 1, 2  # bits of the result of a batch that was applied whole
_NO_TARGET = 2**32 - 1  # a number that no target has
_NOTHING, _CLEAR = Applied([], False), Applied([], True)
# A match: the target's number, its matched blocks, and the matched blocks of each tier.
_MATCH = Struct("=6I")
_GPU, _CPU, _DISK, _UNKNOWN = Tier

_encode = msgspec.msgpack.Encoder().encode
_decode_dump = msgspec.msgpack.Decoder(tuple[list[DumpedRun], list[DumpedHolder]]).decode


class NativeIndex(Index):
    """Index in C++. `core` is the C++ object, for code that reads live batches without Python."""

    def __init__(self, secret: str = "", orphan_blocks: int = ORPHAN_BLOCKS, most_blocks: int = MOST_BLOCKS) -> None:
        super().__init__(secret)
        self.core = NativeCore(secret, orphan_blocks, most_blocks)
        self._numbers: dict[Target, int] = {}
        self._targets: dict[int, Target] = {}
        self._numbering = 0  # version of the numbers: counts every target that was added or dropped

    def add(self, target: Target, adapter: str | None = None, capacity: int | None = None) -> None:
        if target not in self._numbers:
            number = self.core.add(target.model, target.tenant, adapter, capacity)
            self._targets[number] = target
            self._numbers[target] = number
            self._numbering += 1

    def attach(self, target: Target, pool: PoolBlocks) -> None:
        assert isinstance(pool, NativePoolBlocks)
        self.core.attach(self._numbers[target], pool.core)

    def apply_payload(self, target: Target, payload: bytes) -> Applied:
        number = self._numbers.get(target)
        return _NOTHING if number is None else self._result(target, number, payload, self.core.apply(number, payload))

    def number(self, target: Target) -> int:
        """Return the core's number of a target. For an unknown target, it is a number that no target has."""
        return self._numbers.get(target, _NO_TARGET)

    def apply_received(
        self, reader: LiveReader, targets: Sequence[Target], places: Sequence[int]
    ) -> list[tuple[tuple[int, int], Applied | Exception]]:
        """Apply received batches, as `indexer.inbox.Inbox.apply` describes. `targets` has the target of each place."""
        reader.address([(place, self.number(targets[place])) for place in places])
        return self.apply_addressed(reader, targets)

    def apply_addressed(
        self, reader: LiveReader, targets: Sequence[Target]
    ) -> list[tuple[tuple[int, int], Applied | Exception]]:
        """Apply the batches whose targets the reader knows already. `targets` has the target of each place."""
        reports: list[tuple[tuple[int, int], Applied | Exception]] = []
        while (last := reader.apply()) is not None:
            place, seq, payload, outcome = last
            result = partial(self._result, targets[place], self.number(targets[place]), payload, outcome)
            apply_and_report(reports, (place, seq), result)
        return reports

    def _result(self, target: Target, number: int, payload: bytes, applied: int | Outcome) -> Applied:
        """Return the result of a payload, after decoding and applying the events that the core cannot read."""
        if isinstance(applied, int):
            return self._known_result(target, applied) if applied else _NOTHING
        is_batch, _, _, _, foreign = applied
        if not is_batch:
            batch = decode_batch(payload)
            again = self._known_result(target, self.core.apply(number, _encode((0.0, batch.events)), None, True))
            return Applied(batch.rejected + again.rejected, again.cleared)
        if not foreign:
            return self._known_result(target, applied)
        events = [(index, decode_event(index, raw)) for index, raw in foreign]
        known = [(index, _encode(event)) for index, event in events if not isinstance(event, RejectedEvent)]
        again = self._known_result(target, self.core.apply(number, payload, known))
        return Applied(
            [event for _, event in events if isinstance(event, RejectedEvent)] + again.rejected,
            again.cleared,
        )

    def apply(self, target: Target, batch: EventBatch) -> list[RejectedEvent]:
        number = self._numbers.get(target)
        if number is None:
            return []
        return self._known_result(target, self.core.apply(number, _encode((0.0, batch.events)), None, True)).rejected

    def _known_result(self, target: Target, applied: int | Outcome) -> Applied:
        """Return the result of a batch whose events the core can all read."""
        if isinstance(applied, int):
            self.block_size_changes += applied & _NEW_BLOCK_SIZE
            if not applied & _CLEARED:
                return _NOTHING
            self.cleared.add(target)
            return _CLEAR
        _, cleared, new_block_size, rejected, _ = applied
        self.block_size_changes += new_block_size
        if cleared:
            self.cleared.add(target)
        return Applied([RejectedEvent(index, reason) for index, reason in rejected], cleared)

    def clear(self, target: Target) -> None:
        number = self._numbers.get(target)
        if number is not None:
            self.core.clear(number)
            self.cleared.add(target)

    def drop(self, target: Target) -> None:
        number = self._numbers.pop(target, None)
        self.cleared.discard(target)
        self._numbering += 1
        self.block_size_changes += 1
        if number is not None:
            self.core.drop(number)

    def match_from(
        self, root: int, block_size: int, prompt: PackedPrompt, blocks: int, tier: Tier | None = None
    ) -> list[Match]:
        return self._matches(self._found(root, block_size, prompt, blocks, tier), block_size) if blocks > 0 else []

    def match_rows(
        self, root: int, block_size: int, prompt: PackedPrompt, blocks: int, rows: TargetRows, found: RowMatches
    ) -> None:
        if blocks <= 0:
            return
        hashes = self._keyed(root, block_size, prompt, blocks)
        known, numbers = len(hashes), self._numbered(rows)
        others, made = self.core.match_rows(root, block_size, prompt.tokens, hashes, blocks, numbers, found.tokens)
        if made and len(hashes) == known:
            hashes.frombytes(made)
        for row, cpu, disk in others:
            if cpu or disk:
                found.transfers[row] = cpu, disk
            else:
                found.transfers.pop(row, None)

    def choose_rows(
        self, question: ChoiceQuestion, token_ids: PackedPrompt, identity: PackedPrompt
    ) -> ChosenRows | None:
        rows = question.rows
        blocks: list[tuple[int, int, int, array[int]]] = []
        for block_size, root in question.roots:
            most = max(token_ids.length - 1, 0) // block_size
            blocks.append((root, block_size, most, self._keyed(root, block_size, token_ids, most)))
        seed, chunk = question.chunking
        count = identity.length // chunk
        # The core hashes tokens, but no media, and no other identity of the prompt.
        alike = identity is token_ids and not identity.media
        chunks = identity.hashes(seed, chunk, 0 if alike else count)
        known, held = [len(chunks), *[len(hashes) for _, _, _, hashes in blocks]], rows.nothing[:]
        lowest, transfers, by_events, raised, unknown, depths, others, made = choose_target(
            self.core,
            token_ids.tokens,
            blocks,
            (seed, chunk, count, chunks),
            identity.length,
            self._numbered(rows),
            question.in_flight,
            question.sent,
            question.units,
            held,
            question.lines,
            question.prices,
            question.demand,
            question.excluded,
        )
        for number, more in enumerate(made):
            hashes = blocks[number - 1][3] if number else chunks
            if more and len(hashes) == known[number]:  # another thread may have computed them meanwhile
                hashes.frombytes(more)
        return lowest, held, transfers, by_events, raised, unknown, depths, others, chunks

    def _numbered(self, rows: TargetRows) -> array[int]:
        """Return the row of each target by its number; -1 for targets without a row."""
        if rows.numbering != self._numbering:
            rows.numbering = self._numbering
            numbers = {self._numbers[target]: row for target, row in rows.row_of.items() if target in self._numbers}
            rows.numbers = array("i", [numbers.get(each, -1) for each in range(max(numbers, default=-1) + 1)])
        return rows.numbers

    def _found(self, root: int, block_size: int, prompt: PackedPrompt, blocks: int, tier: Tier | None = None) -> bytes:
        hashes = self._keyed(root, block_size, prompt, blocks)
        known = len(hashes)
        if tier is None:
            found, made = self.core.match(root, block_size, prompt.tokens, hashes, blocks)
        else:
            found, made = self.core.match(root, block_size, prompt.tokens, hashes, blocks, tier)
        if made and len(hashes) == known:
            hashes.frombytes(made)
        return found

    def _keyed(self, root: int, block_size: int, prompt: PackedPrompt, blocks: int) -> array[int]:
        """Return the known hashes of a prompt, and those that the core cannot compute: up to the last extra key."""
        return prompt.hashes(root, block_size, min(prompt.keyed_blocks(block_size), blocks) if prompt.media else 0)

    def match_hashes(self, hashes: array[int], block_size: int) -> list[Match]:
        return self._matches(self.core.match_hashes(hashes), block_size)

    def _matches(self, found: bytes, block_size: int) -> list[Match]:
        targets, matches = self._targets, []
        for number, blocks, gpu, cpu, disk, unknown in _MATCH.iter_unpack(found):
            target = targets.get(number)
            if target is not None:  # the target may have been dropped meanwhile
                tiers = {
                    _GPU: gpu * block_size,
                    _CPU: cpu * block_size,
                    _DISK: disk * block_size,
                    _UNKNOWN: unknown * block_size,
                }
                matches.append(Match(target, blocks * block_size, tiers))
        return matches

    def dump(self, target: Target) -> tuple[list[DumpedRun], list[DumpedHolder]]:
        number = self._numbers.get(target)
        return ([], []) if number is None else _decode_dump(self.core.dump(number))

    def restore(self, target: Target, dump: TargetDump) -> None:
        try:
            whole = _encode((dump.runs, dump.holders))
        except OverflowError as error:
            raise DumpError(f"a block of {target} is outside its runs") from error
        restored = self.core.restore(self._numbers[target], whole, dump.block_sizes)
        self.block_size_changes += 1
        if not restored:
            raise DumpError(f"a block of {target} is outside its runs")

    def status(self, target: Target) -> TargetStatus | None:
        number = self._numbers.get(target)
        status = None if number is None else self.core.status(number)
        if status is None:
            return None
        blocks, orphans, counters, block_sizes, window = status
        tiers = dict(zip(Tier, blocks, strict=True))
        return TargetStatus(tiers, frozenset(block_sizes), orphans, HoldingsCounters(*counters), window)

    def evictions(self, target: Target) -> int:
        removed: int = self.core.kept(self.number(target))[1]
        return removed

    def held(self, target: Target) -> int:
        held: int = self.core.kept(self.number(target))[0]
        return held

    def block_sizes(self, targets: Iterable[Target]) -> set[int]:
        known = (self.status(target) for target in targets)
        return set[int]().union(*(status.block_sizes for status in known if status is not None))

    def sweep(self) -> None:
        self.core.sweep()

    def check_integrity(self) -> None:
        assert self.core.is_sound()

    @property
    def runs(self) -> int:
        return self.core.runs()
