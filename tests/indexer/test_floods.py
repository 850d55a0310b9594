"""The memory and time that a hostile or broken stream can use are limited, and other streams are not affected."""

from __future__ import annotations

import math
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from indexer import Index, Match, Target
from indexer.hashing import Namespace, PackedPrompt
from indexer.indexer import make_index
from kvevents import BlockRemoved, BlockStored, Event, EventBatch, MalformedBatchError, RejectedEvent, encode_batch
from kvevents.batches import batch_time

A, B = Target("a", 0, "m"), Target("b", 0, "m")
BASE = Namespace("m", "default", None, None, 2)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def index() -> Index:
    index = make_index(orphan_blocks=100, most_blocks=64)
    index.add(A)
    return index


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, **fields: Any) -> BlockStored:
    return BlockStored(hashes, parent, tokens, len(tokens) // len(hashes), **fields)


def apply(index: Index, *events: Event) -> list[RejectedEvent]:
    rejected = index.apply(A, EventBatch(0.0, list(events)))
    index.check_integrity()
    return rejected


def matched(index: Index, tokens: list[int] = PROMPT, namespace: Namespace = BASE) -> int:
    found: list[Match] = index.match(namespace, PackedPrompt.of(tokens))
    return found[0].matched_tokens if found else 0


@pytest.fixture
def grown() -> Iterator[Callable[[], int]]:
    """Function that returns the bytes allocated since its last call, outside Python too for the native core."""
    tracemalloc.start()
    last = _taken()

    def grown() -> int:
        nonlocal last
        before, last = last, _taken()
        return last - before

    yield grown
    tracemalloc.stop()


def _taken() -> int:
    return tracemalloc.get_traced_memory()[0]


def test_repeated_removals_of_one_orphan_take_no_memory(index: Index, grown: Callable[[], int]) -> None:
    apply(index, stored([2], PROMPT[2:4], 1))
    again = EventBatch(0.0, [BlockRemoved([2])] * 1000)
    index.apply(A, again)
    grown()
    for _ in range(20):
        index.apply(A, again)
    assert grown() < 100_000
    apply(index, stored([1], PROMPT[:2]))
    assert matched(index) == 2, "the block was removed, and the one before it was not"
    status = index.status(A)
    assert status is not None
    assert status.counters.unknown_removed == 21_000 - 1


def test_adoption_takes_no_time_for_repeated_removals(index: Index) -> None:
    apply(index, stored([2], PROMPT[2:4], 1), stored([3], PROMPT[4:6], 99))
    again = encode_batch(EventBatch(0.0, [BlockRemoved([2] * 500_000)]))
    began = time.thread_time()
    index.apply_payload(A, again)
    flood = time.thread_time() - began
    began = time.thread_time()
    index.apply(A, EventBatch(0.0, [stored([1], PROMPT[:2])]))
    assert time.thread_time() - began < max(flood / 5, 0.005)
    assert matched(index) == 2
    status = index.status(A)
    assert status is not None
    assert (status.counters.removed, status.counters.unknown_removed) == (1, 499_999)


def test_prompts_are_matched_while_a_long_removal_is_applied(index: Index, core: str) -> None:
    apply(index, stored([1, 2], PROMPT[:4]), stored([3], PROMPT[4:6], 99))
    again = encode_batch(EventBatch(0.0, [BlockRemoved([3] * (500_000 if core == "native" else 50_000))]))
    flood = threading.Thread(target=index.apply_payload, args=(A, again))
    flood.start()
    matches = 0
    while flood.is_alive():
        matches += matched(index) == 4
    assert matches > 5


def test_different_removals_of_an_orphan_are_limited(index: Index) -> None:
    apply(index, stored([2], PROMPT[2:4], 1))
    apply(index, *[BlockRemoved([2], f"medium {number}") for number in range(150)])
    status = index.status(A)
    assert status is not None
    assert (status.orphans, status.counters.orphans_dropped) == (0, 1)


def window(hashes: list[Any]) -> BlockStored:
    return BlockStored(hashes, None, PROMPT, 2, group_idx=1, kv_cache_spec_kind="mamba")


def test_repeated_early_window_blocks_are_limited(index: Index, grown: Callable[[], int]) -> None:
    again = EventBatch(0.0, [window([4])] * 1000)
    index.apply(A, again)
    grown()
    for _ in range(20):
        index.apply(A, again)
    assert grown() < 100_000
    status = index.status(A)
    assert status is not None
    assert status.counters.orphans_dropped == 21_000 - 100


def test_tokens_of_orphans_are_limited(index: Index) -> None:
    for number in range(10):
        apply(index, stored([number], [7] * 50_000, 99))
    status = index.status(A)
    assert status is not None
    assert status.orphans < 10
    assert status.counters.orphans_dropped > 0


@pytest.mark.parametrize("medium", ["GPU", "CPU_PINNED"])
def test_blocks_are_limited_without_a_known_capacity(index: Index, medium: str) -> None:
    for number in range(200):
        apply(index, stored([number], [number, 1], medium=medium))
    status = index.status(A)
    assert status is not None
    assert sum(status.blocks.values()) <= 64
    assert status.counters.over_capacity == 200 - sum(status.blocks.values())
    assert matched(index, [199, 1]) == 2, "the latest are there"


def test_limit_of_blocks_holds_with_a_second_cache_group() -> None:
    index = make_index(most_blocks=64)
    index.add(A, capacity=16)
    apply(index, stored([1000], [9, 9], group_idx=1))
    for number in range(200):
        apply(index, stored([number], [number, 1]))
    status = index.status(A)
    assert status is not None
    assert sum(status.blocks.values()) <= 64


def test_endless_chain_loses_its_end_first_at_the_limit(index: Index) -> None:
    for number in range(200):
        apply(index, stored([number + 1], [number, 1], number or None))
    tokens = [token for number in range(200) for token in (number, 1)]
    assert 50 <= matched(index, tokens) // 2 <= 64


@pytest.mark.parametrize(
    "foreign",
    [
        {"group_idx": 7},
        {"group_idx": 7, "kv_cache_spec_kind": "full_attention"},
        {"group_idx": 7, "kv_cache_spec_kind": "mamba"},
        {"group_idx": 7, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2**62},
        {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 4},
    ],
)
def test_event_of_a_foreign_cache_group_keeps_matches(index: Index, foreign: dict[str, Any]) -> None:
    apply(index, stored([1, 2], PROMPT[:4]), stored([3, 4], PROMPT[4:], 2))
    apply(index, stored([9], [7, 7], **foreign))
    assert matched(index) == 8
    for number in range(40):
        apply(index, stored([10 + number], [number, 9]))
    apply(index, *[stored([60 + number], [number, 8], **foreign) for number in range(2)])
    assert matched(index) == 8


def test_huge_window_matches_like_full_attention(index: Index) -> None:
    whole = stored([1, 2, 3, 4], PROMPT)
    endless = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2**63}
    apply(index, whole, BlockStored([1, 2, 3, 4], None, PROMPT, 1, **endless))
    assert matched(index) == 8
    apply(index, BlockRemoved([1], None, 1))
    assert matched(index) == 0


def test_block_sizes_are_limited(index: Index) -> None:
    rejected = apply(index, *[stored([size], [7] * size) for size in range(1, 20)])
    assert len(rejected) == 11
    assert "the target has 8 already" in rejected[0].reason
    assert index.block_sizes([A]) == set(range(1, 9))


def test_cache_groups_and_media_are_limited(index: Index) -> None:
    rejected = apply(index, *[stored([size], [7], medium=f"medium {size}") for size in range(100)])
    assert len(rejected) == 100 - 64
    assert "more than 64" in rejected[0].reason


def batch_with(events: bytes) -> bytes:
    return b"\x92\xcb" + struct.pack(">d", 1.0) + events


STORED = b"\x82\xa4type\xabBlockStored\xacblock_hashes"


@pytest.mark.parametrize("count", [1000, 2**24, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("before", [b"", b"\x91", b"\x91" + STORED, b"\x91\x92\xabBlockStored"])
@pytest.mark.parametrize("kind", [b"\xdd", b"\xdf", b"\xdb", b"\xc6"])
def test_array_length_beyond_the_payload_allocates_nothing(
    index: Index, count: int, before: bytes, kind: bytes, grown: Callable[[], int]
) -> None:
    started = time.process_time()
    with pytest.raises(MalformedBatchError):
        index.apply_payload(A, batch_with(before + kind + struct.pack(">I", count)))
    assert time.process_time() - started < 0.5
    assert grown() < 1_000_000


def test_batch_of_nulls_is_rejected_early(index: Index) -> None:
    with pytest.raises(MalformedBatchError, match="events in"):
        index.apply_payload(A, msgspec.msgpack.encode([1.0, [None] * 100_000]))


@pytest.mark.parametrize("made_at", [math.nan, math.inf, -math.inf, 1e308, -1e308])
def test_invalid_batch_time_is_none(made_at: float) -> None:
    assert batch_time(msgspec.msgpack.encode([made_at, []])) is None
    assert batch_time(msgspec.msgpack.encode([2**63, []])) is None
    assert batch_time(msgspec.msgpack.encode([1.7e9, []])) == 1.7e9


def test_flood_of_one_target_leaves_other_targets_unchanged(index: Index) -> None:
    index.add(B)
    index.apply(B, EventBatch(0.0, [stored([1, 2], PROMPT[:4])]))
    for number in range(200):
        apply(index, stored([number], [number, 1]), stored([1000 + number], [1, 2], 5000), BlockRemoved([number - 1]))
    assert [match.matched_tokens for match in index.match(BASE, PackedPrompt.of(PROMPT)) if match.target == B] == [4]
