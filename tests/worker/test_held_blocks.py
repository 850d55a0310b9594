"""The blocks that an engine holds, against a naive count of references, and their snapshots."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvevents import BlockRemoved, BlockStored, Event
from worker.held_blocks import HeldBlocks

BLOCK = 2  # tokens
Place: TypeAlias = tuple[int, str]

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=6)
places = st.sampled_from([(0, "GPU"), (0, "CPU"), (1, "GPU")])
changes = st.lists(st.tuples(st.booleans(), places, prompts, st.integers(0, 5), st.integers(1, 6)), max_size=40)


def name(prompt: list[int]) -> int:
    return int("".join(str(token + 1) for token in prompt))


def stored(prompt: list[int], start: int, place: Place) -> BlockStored:
    start %= len(prompt)
    names = [name(prompt[: end + 1]) for end in range(len(prompt))]
    return BlockStored(
        list(names[start:]),
        names[start - 1] if start else None,
        [token for token in prompt[start:] for _ in range(BLOCK)],
        BLOCK,
        medium=place[1],
        group_idx=place[0],
        extra_keys=[[each] for each in names[start:]],
    )


class Reader:
    """A reader of the reports, which must not repeat a block, and must have each block's tokens and keys."""

    def __init__(self) -> None:
        self.held: set[tuple[Place, int]] = set()

    def read(self, events: list[Event]) -> None:
        for event in events:
            assert isinstance(event, BlockStored | BlockRemoved)
            place = (event.group_idx or 0, event.medium or "GPU")
            told = {(place, block) for block in event.block_hashes}
            assert len(told) == len(event.block_hashes) > 0
            if isinstance(event, BlockRemoved):
                assert told <= self.held
                self.held -= told
                continue
            assert not told & self.held
            self.held |= told
            parent = event.parent_block_hash
            for at, block in enumerate(event.block_hashes):
                assert parent == (block // 10 or None)
                assert event.token_ids[at * BLOCK : (at + 1) * BLOCK] == [block % 10 - 1] * BLOCK
                assert event.extra_keys is not None
                assert event.extra_keys[at] == [block]
                parent = block


@given(changes)
def test_changes_and_snapshots_reproduce_held_blocks(
    changes: list[tuple[bool, Place, list[int], int, int]],
) -> None:
    held, reader = HeldBlocks(), Reader()
    counts: Counter[tuple[Place, int]] = Counter()
    for is_store, place, prompt, start, count in changes:
        event = stored(prompt, start, place)
        if is_store:
            counts.update((place, block) for block in event.block_hashes)
            reader.read(list(held.store(event)))
        else:
            some = event.block_hashes[:count]
            counts -= Counter((place, block) for block in some)
            reader.read(list(held.remove(BlockRemoved(list(some), place[1], place[0]))))
        assert reader.held == set(counts)
        assert len(held) == len(counts)
    again = Reader()
    events = [event for batch in held.snapshot() for event in batch]
    again.read(events)
    assert again.held == set(counts)
    seen: set[int] = set()
    anywhere = {block for _, block in counts}
    for event in events:
        assert isinstance(event, BlockStored)
        assert event.parent_block_hash in seen or event.parent_block_hash not in anywhere
        seen.update(event.block_hashes)  # type: ignore[arg-type]


def test_snapshot_content_is_fixed_at_call() -> None:
    held = HeldBlocks()
    held.store(stored([0, 1, 2], 0, (0, "GPU")))
    snapshot = held.snapshot()
    held.remove(BlockRemoved([1, 12, 123], "GPU", 0))
    [[event]] = snapshot
    assert isinstance(event, BlockStored)
    assert event.block_hashes == [1, 12, 123]


def test_long_snapshot_is_split_in_batches() -> None:
    held = HeldBlocks()
    for number in range(1, 1000):
        held.store(BlockStored([number], number - 1 or None, [number], 1))
    batches = list(held.snapshot())
    assert len(batches) == 16
    assert sum(map(len, batches)) == 999


def test_snapshot_adds_tokens_of_blocks_moved_to_other_medium() -> None:
    """An engine that offloads says no more than the names."""
    held = HeldBlocks()
    held.store(BlockStored([1, 2], None, [1, 1, 2, 2], 2, medium="GPU", lora_name="sql"))
    moved = BlockStored([2], None, [], 0, medium="CPU")
    assert held.store(moved) == [moved]
    held.remove(BlockRemoved([1, 2], "GPU"))
    assert list(held.snapshot()) == [[BlockStored([2], 1, [2, 2], 2, medium="CPU", lora_name="sql", extra_keys=[None])]]


def test_blocks_unknown_to_all_media_are_reported_unchanged() -> None:
    held = HeldBlocks()
    event = BlockStored([1, 2], None, [], 0, medium="CPU")
    assert held.store(event) == [event]
    [[first, second]] = held.snapshot()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.block_hashes + second.block_hashes == [1, 2]


def test_sliding_window_group_keeps_sparse_blocks() -> None:
    """The tokens of the block are those of the whole span."""
    held = HeldBlocks()
    event = BlockStored(
        [3, 4], 2, list(range(12)), 2, group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=3
    )
    assert held.store(event) == [event]
    held.remove(BlockRemoved([3], None, 1))
    [[left]] = held.snapshot()
    assert isinstance(left, BlockStored)
    assert (left.block_hashes, left.token_ids) == ([4], list(range(12)))


@pytest.mark.parametrize("tokens", [[1, -1], [1, 2**32], [1, "2"], [1, None]])
def test_invalid_tokens_are_named_and_nothing_is_held(tokens: list[int]) -> None:
    held = HeldBlocks()
    with pytest.raises(ValueError, match="token_ids"):
        held.store(BlockStored([1], None, tokens, 2))
    assert len(held) == 0


def test_removed_blocks_free_their_tokens() -> None:
    held = HeldBlocks()
    names: list[int | bytes] = list(range(1, 1001))
    tracemalloc.start()
    held.store(BlockStored(list(names), None, [0] * 1_000_000, 1000))
    whole, _ = tracemalloc.get_traced_memory()
    held.remove(BlockRemoved(names[1:]))
    left, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert whole > 4_000_000 > 10 * left
    [[event]] = held.snapshot()
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.token_ids) == ([1], [0] * 1000)
