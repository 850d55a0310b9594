"""The blocks that an engine holds, by cache group and medium.

References are counted, and enough of each block is kept to report it again in a snapshot. Blocks that were stored
together form a run. A run keeps its tokens packed (4 bytes each):

    stored [a b c d] ──▶ run 1: a b c d      removed [b] ──▶ still run 1, b is no longer looked up
                                             removed [c] ──▶ half is removed: runs 2 (a) and 3 (d) replace it
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvevents import BlockRemoved, BlockStored, EngineHash, Event
from kvevents.events import has_identity

_BATCH_BLOCKS = 64  # blocks in one batch of a snapshot


@dataclass(slots=True, eq=False)
class _Run:
    """A run: blocks that were stored by one event, of which `live` are held."""

    stored_event: BlockStored
    tokens: array[int]
    live: int

    @property
    def sliceable(self) -> bool:
        """True if each block has its own tokens."""
        return len(self.tokens) == len(self.stored_event.block_hashes) * self.stored_event.block_size

    def event(self, start: int, end: int, medium: str | None, group_idx: int | None) -> BlockStored:
        """Return the event that stores the blocks from `start` to `end` (exclusive)."""
        return _slice(
            self.stored_event,
            start,
            end,
            token_ids=self._tokens_of(start, end).tolist(),
            medium=medium,
            group_idx=group_idx,
        )

    def part(self, start: int, end: int) -> _Run:
        """Return the blocks from `start` to `end` (exclusive) as a new run."""
        return _Run(_slice(self.stored_event, start, end), self._tokens_of(start, end), end - start)

    def _tokens_of(self, start: int, end: int) -> array[int]:
        size = self.stored_event.block_size
        return self.tokens[start * size : end * size] if self.sliceable else self.tokens


@dataclass(slots=True, eq=False)
class _Place:
    """One cache group in one medium. `copies` counts references beyond the first."""

    medium: str | None
    group_idx: int | None
    runs: dict[EngineHash, _Run] = field(default_factory=dict)
    copies: dict[EngineHash, int] = field(default_factory=dict)


class HeldBlocks:
    """The blocks of one DP rank. Changes return the events of first references, and of last ones removed."""

    def __init__(self) -> None:
        self.unknown_removed = 0
        self._places: dict[tuple[int, str], _Place] = {}

    def __len__(self) -> int:
        return sum(len(place.runs) for place in self._places.values())

    def store(self, event: BlockStored) -> list[BlockStored]:
        """Count a reference to each block, and return events for new ones. Raises ValueError (field) for a token ID.

        The event must not be changed afterwards.
        """
        try:
            tokens = array("I", event.token_ids)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"token_ids: {error}") from error
        place = self._place(event.group_idx, event.medium)
        hashes = event.block_hashes
        run = _Run(_slice(event, 0, len(hashes)), tokens, len(hashes))
        new = dict.fromkeys(hashes, run)
        if tokens and len(new) == len(hashes) and place.runs.keys().isdisjoint(new):
            place.runs.update(new)
            return [event]
        spans: list[tuple[int, int]] = []
        for index, block in enumerate(hashes):
            if block in place.runs:
                place.copies[block] = place.copies.get(block, 0) + 1
                continue
            place.runs[block] = run
            start = spans.pop()[0] if spans and spans[-1][1] == index else index
            spans.append((start, index + 1))
        for start, end in spans:
            for part in [run.part(start, end)] if tokens else self._known(event, start, end):
                place.runs.update(dict.fromkeys(part.stored_event.block_hashes, part))
        return [run.event(start, end, event.medium, event.group_idx) for start, end in spans]

    def remove(self, event: BlockRemoved) -> list[BlockRemoved]:
        """Remove a reference to each block, and return an event for blocks that lost their last one."""
        place = self._place(event.group_idx, event.medium)
        last = event.block_hashes
        if place.copies:
            last = [block for block in last if not _take_copy(place.copies, block)]
        runs = [place.runs.pop(block, None) for block in last]
        if None in runs:
            self.unknown_removed += runs.count(None)
            last = [block for block, run in zip(last, runs, strict=True) if run is not None]
        for run, count in Counter(filter(None, runs)).items():
            run.live -= count
            if 0 < 2 * run.live <= len(run.stored_event.block_hashes):
                _split(place, run)
        return [BlockRemoved(last, event.medium, event.group_idx)] if last else []

    def clear(self) -> None:
        """Drop all blocks."""
        self._places.clear()

    def clear_medium(self, medium: str | None) -> list[BlockRemoved]:
        """Drop a medium's blocks, and return a removal of each: older readers ignore the medium of a clear."""
        removed = []
        for kind in [kind for kind in self._places if kind[1] == (medium or "GPU")]:
            place = self._places.pop(kind)
            if place.runs:
                removed.append(BlockRemoved(list(place.runs), place.medium, place.group_idx))
        return removed

    def snapshot(self) -> Iterator[list[Event]]:
        """Return batches that store all held blocks, each after its parent, fixed now and readable in any thread."""
        places = [(place.medium, place.group_idx, place.runs.copy()) for place in self._places.values()]
        return _batches(places)

    def _place(self, group_idx: int | None, medium: str | None) -> _Place:
        kind = group_idx or 0, medium or "GPU"  # readers apply the same defaults
        place = self._places.get(kind)
        if place is None:
            place = self._places[kind] = _Place(medium, group_idx)
        return place

    def _known(self, event: BlockStored, start: int, end: int) -> Iterator[_Run]:
        """Yield runs for blocks of an event without tokens: copies of blocks that another medium holds."""
        for index in range(start, end):
            block = event.block_hashes[index]
            known = (place.runs.get(block) for place in self._places.values())
            run = next((run for run in known if run is not None and run.tokens), None)
            if run is None:
                yield _Run(_slice(event, index, index + 1), array("I"), 1)
            else:
                at = run.stored_event.block_hashes.index(block)
                part = run.part(at, at + 1)
                if part.stored_event.extra_keys is None and has_identity(run.stored_event):
                    part.stored_event.extra_keys = [None]  # readers need it in other media than the engine's own
                yield part


def _take_copy(copies: dict[EngineHash, int], block: EngineHash) -> bool:
    """Lower a count, and drop it at 0. Return whether it existed."""
    count = copies.pop(block, 0)
    if count > 1:
        copies[block] = count - 1
    return count > 0


def _slice(event: BlockStored, start: int, end: int, **changes: Any) -> BlockStored:
    """Return a copy of the event with the blocks `start` to `end`, without tokens unless `changes` has them."""
    hashes = event.block_hashes
    fields: dict[str, Any] = {
        "block_hashes": hashes[start:end],
        "parent_block_hash": hashes[start - 1] if start else event.parent_block_hash,
        "token_ids": [],
        "extra_keys": event.extra_keys and event.extra_keys[start:end],
    }
    return msgspec.structs.replace(event, **fields | changes)


def _split(place: _Place, run: _Run) -> None:
    """Move the remaining blocks of a run to smaller runs, so that tokens of removed blocks use no memory."""
    if not run.sliceable:
        return
    for start, end in list(_spans(run, place.runs)):
        part = run.part(start, end)
        for block in part.stored_event.block_hashes:
            place.runs[block] = part


def _spans(run: _Run, held: dict[EngineHash, _Run]) -> Iterator[tuple[int, int]]:
    hashes = run.stored_event.block_hashes
    start = 0
    while start < len(hashes):
        end = start
        while end < len(hashes) and held.get(hashes[end]) is run:
            end += 1
        if end > start:
            yield start, end
        start = max(end, start + 1)


def _batches(places: Sequence[tuple[str | None, int | None, dict[EngineHash, _Run]]]) -> Iterator[list[Event]]:
    batch: list[Event] = []
    blocks = 0
    for event in _parents_first(places):
        batch.append(event)
        blocks += len(event.block_hashes)
        if blocks >= _BATCH_BLOCKS:
            yield batch
            batch, blocks = [], 0
    if batch:
        yield batch


def _parents_first(
    places: Sequence[tuple[str | None, int | None, dict[EngineHash, _Run]]],
) -> Iterator[BlockStored]:
    emitted: set[EngineHash] = set()
    waiting: dict[EngineHash, list[BlockStored]] = {}
    for medium, group_idx, held in places:
        for run in dict.fromkeys(held.values()):
            for start, end in _spans(run, held):
                parent = run.stored_event.block_hashes[start - 1] if start else run.stored_event.parent_block_hash
                event = run.event(start, end, medium, group_idx)
                if parent is not None and parent not in emitted and any(parent in each for _, _, each in places):
                    waiting.setdefault(parent, []).append(event)
                    continue
                ready = [event]
                while ready:
                    event = ready.pop()
                    yield event
                    emitted.update(event.block_hashes)
                    for block in event.block_hashes:
                        ready += waiting.pop(block, ())
    for left in waiting.values():  # blocks that are parents of one another
        yield from left
