"""Matches and status of targets after single events."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer import Index, Match, Target, make_index
from indexer.hashing import MediaSpan, Namespace, PackedPrompt, namespace_hash, pack_tokens
from indexer.reference.tree import RUN_BLOCKS
from kvevents import AllBlocksCleared, BlockRemoved, BlockStored, Event, EventBatch, RejectedEvent, Tier

A, B = Target("a", 0, "m"), Target("b", 0, "m")
BASE = Namespace("m", "default", None, None, 2)
PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture
def index() -> Index:
    index = make_index()
    index.add(A)
    index.add(B)
    return index


def stored(hashes: list[Any], tokens: list[int], parent: Any = None, **fields: Any) -> BlockStored:
    return BlockStored(hashes, parent, tokens, len(tokens) // len(hashes), **fields)


def apply(index: Index, target: Target, *events: Event) -> list[RejectedEvent]:
    rejected = index.apply(target, EventBatch(0.0, list(events)))
    index.check_integrity()
    return rejected


def match(index: Index, tokens: list[int] = PROMPT, namespace: Namespace = BASE) -> dict[Target, int]:
    return {found.target: found.matched_tokens for found in index.match(namespace, PackedPrompt.of(tokens))}


def blocks(index: Index, target: Target = A) -> dict[Tier, int]:
    status = index.status(target)
    assert status is not None
    return {tier: count for tier, count in status.blocks.items() if count}


def drop_all(index: Index, *targets: Target) -> None:
    for target in targets:
        index.drop(target)
    for _ in range(100):
        index.sweep()
    index.check_integrity()


def test_cleared_targets_are_listed_until_read(index: Index) -> None:
    apply(index, A, stored([1], PROMPT[:2]))
    assert index.cleared == set()
    apply(index, A, AllBlocksCleared(), stored([1], PROMPT[:2]))
    assert index.cleared == {A}
    index.clear(B)
    assert index.cleared == {A, B}
    index.drop(A)
    assert index.cleared == {B}


def test_match_ends_at_the_first_missing_block(index: Index) -> None:
    apply(index, A, stored([1, 2, 3, 4], PROMPT))
    apply(index, B, stored([1, 2], PROMPT[:4]))
    assert match(index) == {A: 8, B: 4}
    assert match(index, [1, 2, 3, 4, 9, 9]) == {A: 4, B: 4}
    assert match(index, [9, 9]) == {}


def test_only_full_blocks_match(index: Index) -> None:
    apply(index, A, stored([1, 2], PROMPT[:4]))
    assert match(index, PROMPT[:3]) == {A: 2}
    assert match(index, [1]) == {}
    assert match(index, []) == {}


def test_match_can_be_limited_to_the_first_blocks(index: Index) -> None:
    apply(index, A, stored([1, 2, 3, 4], PROMPT))
    assert [found.matched_tokens for found in index.match(BASE, PackedPrompt.of(PROMPT), 3)] == [6]
    assert index.match(BASE, PackedPrompt.of(PROMPT), 0) == []


def test_blocks_follow_the_parent_in_their_event(index: Index) -> None:
    apply(index, A, stored([1, 2], [1, 2, 3, 4]), stored([3], [5, 6], 2), stored([9], [9, 9], 1))
    assert match(index) == {A: 6}
    assert match(index, [1, 2, 9, 9]) == {A: 4}


def test_engine_hashes_are_separate_per_target(index: Index) -> None:
    apply(index, A, stored([1], [1, 2]))
    apply(index, B, stored([1], [3, 4]), stored([2], [5, 6], 1))
    assert match(index, [1, 2, 5, 6]) == {A: 2}
    assert match(index, [3, 4, 5, 6]) == {B: 4}


@pytest.mark.parametrize("name", [2**64 - 1, -5, b"\xab" * 32])
def test_engine_hash_may_be_integer_or_bytes(index: Index, name: int | bytes) -> None:
    apply(index, A, stored([name], [1, 2]), stored([7], [3, 4], name))
    assert match(index) == {A: 4}
    apply(index, A, BlockRemoved([name]))
    assert match(index) == {}


def test_block_is_removed_with_its_last_copy(index: Index) -> None:
    apply(index, A, stored([1], PROMPT[:2]), *[stored([2], PROMPT[2:4], 1)] * 3)
    apply(index, A, BlockRemoved([2]), BlockRemoved([2]))
    assert match(index) == {A: 4}
    apply(index, A, BlockRemoved([2]))
    assert match(index) == {A: 2}


def test_children_match_again_after_their_parent_is_stored_again(index: Index) -> None:
    apply(index, A, stored([1, 2, 3, 4], PROMPT))
    apply(index, A, BlockRemoved([2]))
    assert match(index) == {A: 2}
    apply(index, A, stored([2], [3, 4], 1))
    assert match(index) == {A: 8}


def test_removed_block_ends_only_matches_through_it(index: Index) -> None:
    apply(index, A, stored([1, 2, 3], PROMPT[:6]), stored([9], [9, 9], 1), BlockRemoved([2]))
    assert match(index, [1, 2, 9, 9]) == {A: 4}


def test_blocks_wait_for_an_unknown_parent(index: Index) -> None:
    apply(index, A, stored([4], [7, 8], 3), stored([3], [5, 6], 2))
    assert match(index) == {}
    status = index.status(A)
    assert status is not None
    assert status.orphans == 2
    apply(index, A, stored([1, 2], PROMPT[:4]))
    assert match(index) == {A: 8}
    assert index.status(A).orphans == 0  # type: ignore[union-attr]


def test_parent_0_that_is_no_block_is_no_parent(index: Index) -> None:
    apply(index, A, stored([1, 2], PROMPT[:4], 0), stored([3], [5, 6], 2))
    assert match(index) == {A: 6}
    assert index.status(A).orphans == 0  # type: ignore[union-attr]
    salted = Namespace("m", "default", "adapter", "salt", 2)
    apply(index, A, stored([5, 6], PROMPT[:4], 0, lora_name="adapter", extra_keys=[["adapter", "salt"], ["adapter"]]))
    assert match(index, PROMPT[:4], salted) == {A: 4}


def test_parent_0_that_is_a_block_is_a_parent(index: Index) -> None:
    apply(index, A, stored([0], PROMPT[:2]), stored([1], PROMPT[2:4], 0))
    assert match(index) == {A: 4}
    apply(index, A, BlockRemoved([1]), BlockRemoved([0]), stored([1], PROMPT[2:4], 0))
    assert match(index, PROMPT[2:4]) == {A: 2}


def test_orphan_removed_while_waiting_stays_removed(index: Index) -> None:
    apply(index, A, stored([3, 4], [5, 6, 7, 8], 2), BlockRemoved([4]), stored([1, 2], PROMPT[:4]))
    assert match(index) == {A: 6}


def test_children_of_a_removed_orphan_find_their_parent(index: Index) -> None:
    apply(index, A, stored([2], [3, 4], 1), stored([3], [5, 6], 2), BlockRemoved([2]), stored([1], [1, 2]))
    assert match(index) == {A: 2}
    apply(index, A, stored([2], [3, 4], 1))
    assert match(index) == {A: 6}


def test_oldest_orphans_are_dropped_at_the_limit() -> None:
    index = make_index(orphan_blocks=2)
    index.add(A)
    apply(index, A, stored([2], [3, 4], 1), stored([12], [3, 4], 11), stored([22], [3, 4], 21))
    status = index.status(A)
    assert status is not None
    assert (status.orphans, status.counters.orphans_dropped) == (2, 1)
    apply(index, A, stored([1], [1, 2]), stored([21], [5, 6]))
    assert match(index) == {A: 2}
    assert match(index, [5, 6, 3, 4]) == {A: 4}


def test_waiting_copy_survives_the_drop_of_another() -> None:
    index = make_index(orphan_blocks=3)
    index.add(A)
    apply(index, A, stored([2, 3], [3, 4, 5, 6], 1), stored([3], [5, 6], 2))
    apply(index, A, stored([12, 13], [1] * 4, 11))  # beyond the limit: the event that waits for block 1 is dropped
    apply(index, A, BlockRemoved([3]), stored([1, 2], PROMPT[:4]))
    assert match(index) == {A: 4}


def test_each_block_counts_in_its_fastest_tier(index: Index) -> None:
    apply(index, A, stored([1, 2, 3, 4], PROMPT, medium="CPU_PINNED"), stored([1, 2], PROMPT[:4], medium="GPU"))
    apply(index, A, stored([3], [5, 6], 2, medium="STORAGE"), BlockRemoved([3], "CPU_PINNED"))
    (found,) = index.match(BASE, PackedPrompt.of(PROMPT))
    assert found == Match(A, 8, {Tier.GPU: 4, Tier.CPU: 2, Tier.DISK: 2, Tier.UNKNOWN: 0})
    assert blocks(index) == {Tier.GPU: 2, Tier.CPU: 3, Tier.DISK: 1}


def test_match_in_one_tier_ends_at_the_first_block_that_is_not_there(index: Index) -> None:
    apply(index, A, stored([1, 2, 3, 4], PROMPT), stored([1, 2], PROMPT[:4], medium="CPU"))
    apply(index, A, stored([4], PROMPT[6:], 3, medium="CPU_PINNED"))
    apply(index, B, stored([1, 2, 3, 4], PROMPT))
    root, prompt = namespace_hash(BASE, index.secret), PackedPrompt.of(PROMPT)
    found = index.match_from(root, 2, prompt, 4, Tier.CPU)
    assert [(each.target, each.matched_tokens, each.tiers[Tier.CPU]) for each in found] == [(A, 4, 4)]
    assert len(index.match_from(root, 2, prompt, 4)) == 2
    assert index.match_from(root, 2, prompt, 4, Tier.DISK) == []


def test_removal_from_one_medium_keeps_other_media(index: Index) -> None:
    apply(index, A, stored([1], [1, 2], medium="GPU"), stored([1], [1, 2], medium="CPU"), BlockRemoved([1], "GPU"))
    (found,) = index.match(BASE, PackedPrompt.of(PROMPT))
    assert found.tiers[Tier.CPU] == found.matched_tokens == 2


def test_unknown_medium_counts_in_the_unknown_tier(index: Index) -> None:
    apply(index, A, stored([1], [1, 2], medium="CXL", extra_keys=[None]))
    (found,) = index.match(BASE, PackedPrompt.of(PROMPT))
    assert found.tiers == {Tier.GPU: 0, Tier.CPU: 0, Tier.DISK: 0, Tier.UNKNOWN: 2}


def test_event_without_medium_is_about_gpu_memory(index: Index) -> None:
    apply(index, A, stored([1], [1, 2]), BlockRemoved([1], "GPU"))
    assert match(index) == {}


def test_offloaded_block_is_stored_without_tokens(index: Index) -> None:
    apply(index, A, stored([1, 2], PROMPT[:4]), BlockStored([1, 2, 77], medium="CPU"), BlockRemoved([1, 2]))
    (found,) = index.match(BASE, PackedPrompt.of(PROMPT))
    assert found.tiers[Tier.CPU] == 4
    assert index.status(A).counters.orphans_dropped == 1  # type: ignore[union-attr]


def test_clear_removes_all_blocks_of_one_target_only(index: Index) -> None:
    for target in (A, B):
        apply(index, target, stored([1], [1, 2]), stored([3], [5, 6], 2))
    apply(index, A, AllBlocksCleared())
    assert match(index) == {B: 2}
    apply(index, A, stored([2], [3, 4], 1))
    assert match(index) == {B: 2}, "its parent is gone"
    status = index.status(A)
    assert status is not None
    assert (status.orphans, status.counters.cleared) == (1, 1)


def test_clear_of_one_medium_keeps_other_media(index: Index) -> None:
    apply(index, A, stored([1, 2], PROMPT[:4]), stored([1], [1, 2], medium="CPU_PINNED"))
    apply(index, A, stored([4], [7, 8], 3), stored([4], [7, 8], 3, medium="CPU_PINNED"))
    apply(index, A, AllBlocksCleared("GPU"))
    assert match(index) == {A: 2}
    assert blocks(index) == {Tier.CPU: 1}
    apply(index, A, stored([2, 3], [3, 4, 5, 6], 1, medium="DISK"))
    (found,) = index.match(BASE, PackedPrompt.of(PROMPT))
    assert found.tiers == {Tier.GPU: 0, Tier.CPU: 4, Tier.DISK: 4, Tier.UNKNOWN: 0}


def test_clear_by_call_removes_all_blocks(index: Index) -> None:
    apply(index, A, stored([1], [1, 2]))
    index.clear(A)
    index.clear(Target("nobody", 0, "m"))
    assert match(index) == {}


def test_events_of_an_unknown_target_are_ignored(index: Index) -> None:
    index.drop(A)
    assert apply(index, A, stored([1], [1, 2])) == []
    assert index.status(A) is None
    assert index.runs == 0


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (BlockStored([1, 2], None, [1, 2, 3], 2), "3 ids for 2 blocks of block_size 2"),
        (BlockStored([1, 2], None, [1, 2, 3]), "3 ids for 2 blocks"),
        (BlockStored([1], None, [1, 2], -2), "block_size -2"),
        (BlockStored([1], None, [1, -2], 2), "unsigned 32-bit"),
        (BlockStored([1], None, [1, 2**32], 2), "unsigned 32-bit"),
        (BlockStored([1, 1], None, [1, 2, 3, 4], 2), "duplicate"),
        (BlockStored([1, 2], None, [1, 2, 3, 4], 2, extra_keys=[["a"]]), "1 entries for 2 blocks"),
    ],
)
def test_invalid_event_is_rejected_alone(index: Index, event: BlockStored, reason: str) -> None:
    (rejected,) = apply(index, A, stored([8], [1, 2]), event, stored([9], [3, 4], 8))
    assert rejected.index == 1
    assert reason in rejected.reason
    assert match(index) == {A: 4}
    assert blocks(index) == {Tier.GPU: 2}


def test_missing_block_size_follows_from_the_tokens(index: Index) -> None:
    apply(index, A, BlockStored([1, 2], None, [1, 2, 3, 4]))
    assert match(index) == {A: 4}
    assert index.block_sizes([A, B]) == {2}


def test_groups_with_partial_prefixes_add_no_blocks(index: Index) -> None:
    window = stored([1, 2], PROMPT[:4], group_idx=1, kv_cache_spec_kind="sliding_window")
    full = stored([1, 2], PROMPT[:4], group_idx=0, kv_cache_spec_kind="full_attention")
    apply(index, A, window)
    assert index.runs == 0
    apply(index, A, full, BlockRemoved([1], group_idx=1))
    assert match(index) == {A: 4}


@pytest.mark.parametrize(
    ("fields", "adapter", "salt"),
    [
        ({"lora_name": "sql"}, "sql", None),
        ({"lora_id": 4}, "lora_id:4", None),
        ({"extra_keys": [["sql"], ["sql"]]}, "sql", None),
        ({"cache_salt": "s"}, None, "s"),
        ({"extra_keys": [["s"], None]}, None, "s"),
        ({"lora_name": "sql", "extra_keys": [["sql", "s"], ["sql"]]}, "sql", "s"),
    ],
)
def test_blocks_match_only_their_adapter_and_salt(
    index: Index, fields: dict[str, Any], adapter: str | None, salt: str | None
) -> None:
    later = {**fields, "extra_keys": fields["extra_keys"][1:]} if "extra_keys" in fields else fields
    apply(index, A, stored([1, 2], PROMPT[:4], **fields), stored([3], [5, 6], 2, **later))
    assert match(index) == {}
    assert match(index, namespace=Namespace("m", "default", adapter, salt, 2)) == {A: 6}


def test_adapter_of_a_target_applies_to_events_without_one() -> None:
    index = make_index()
    index.add(A, "sql")
    apply(index, A, stored([1], [1, 2]), AllBlocksCleared(), stored([1], [1, 2]))
    assert match(index) == {}
    assert match(index, namespace=Namespace("m", "default", "sql", None, 2)) == {A: 2}


def test_two_images_on_the_same_tokens_do_not_match_each_other(index: Index) -> None:
    apply(index, A, stored([1, 2], PROMPT[:4], extra_keys=[None, [["image-1", 0]]]))
    apply(index, B, stored([1, 2], PROMPT[:4], extra_keys=[None, [["image-2", 0]]]))
    assert match(index) == {A: 2, B: 2}


def test_prompt_with_image_names_matches_beyond_its_images(index: Index) -> None:
    """One image has tokens 4 to 7, another one token 8. The events have the form of vLLM."""
    tokens = list(range(1, 15))
    keys = [None, [["one", 1]], [["one", -1]], [["one", -3], ["two", 1]], None, None, None]
    apply(index, A, stored([1, 2, 3, 4, 5, 6, 7], tokens, extra_keys=keys))
    packed = pack_tokens(tokens)

    def held(*media: tuple[int, int, str]) -> list[int]:
        prompt = PackedPrompt(packed, tuple(MediaSpan(*each) for each in media))
        found = [index.match(BASE, prompt, blocks) for blocks in (1, 3, None)]  # hashes are computed in steps
        return [match.matched_tokens for matches in found for match in matches]

    assert held((3, 7, "one"), (7, 8, "two")) == [2, 6, 14]
    assert held((3, 7, "other"), (7, 8, "two")) == [2, 2, 2]
    assert held((3, 7, "one"), (7, 8, "other")) == [2, 6, 6]
    assert held((3, 6, "one"), (7, 8, "two")) == [2, 6, 6]
    assert held() == [2, 2, 2]


def test_equal_blocks_with_different_engine_hashes_are_removed_separately(index: Index) -> None:
    for first, second in ((1, 11), (11, 1)):
        apply(index, A, stored([1], [1, 2]), stored([11], [1, 2]), BlockRemoved([first]))
        assert match(index) == {A: 2}
        apply(index, A, BlockRemoved([second]))
        assert match(index) == {}
        assert index.runs == 0
    apply(index, A, stored([2], [3, 4], 1), stored([5], [5, 6]))
    assert match(index, [5, 6, 3, 4]) == {A: 2}, "block 1 is unknown, and what hangs from it waits"


def test_block_at_a_new_position_frees_the_old_one(index: Index) -> None:
    apply(index, A, stored([1], [1, 2]), stored([1], [5, 6]))
    assert match(index) == {}
    assert match(index, [5, 6]) == {A: 2}
    apply(index, A, BlockRemoved([1]))
    assert index.runs == 0


def test_removals_of_unknown_blocks_are_counted(index: Index) -> None:
    apply(index, A, BlockRemoved([1, 2]), stored([1], [1, 2]), BlockRemoved([1], "CPU"))
    status = index.status(A)
    assert status is not None
    assert (status.counters.stored, status.counters.removed, status.counters.unknown_removed) == (1, 0, 3)


def test_matches_are_equal_with_a_secret() -> None:
    index, open_to_all = make_index(secret="s"), make_index()
    for each in (index, open_to_all):
        each.add(A)
        apply(each, A, stored([1, 2], PROMPT[:4]))
        assert match(each) == {A: 4}
    (hidden,), (known,) = index.dump(A)[0], open_to_all.dump(A)[0]
    assert set(hidden.hashes).isdisjoint(known.hashes)


def test_adding_a_known_target_changes_nothing(index: Index) -> None:
    apply(index, A, stored([1], [1, 2]))
    index.add(A, "other")
    assert match(index) == {A: 2}


def test_dropping_all_targets_frees_the_tree(index: Index) -> None:
    for target in (A, B):
        apply(index, target, stored([1, 2, 3], PROMPT[:6]), stored([7], [7, 7], 1), stored([1], [1, 2], medium="CPU"))
    drop_all(index, A)
    assert match(index) == {B: 6}
    drop_all(index, B)
    assert index.runs == 0


def test_large_holding_is_freed_in_steps_and_stops_matching_at_once(index: Index) -> None:
    tokens = [[number, 1] for number in range(9000)]
    for number, block in enumerate(tokens):
        index.apply(A, EventBatch(0.0, [stored([number], block)]))
    index.drop(A)
    assert index.runs > 0
    assert match(index, tokens[0]) == {}
    drop_all(index)
    assert index.runs == 0


# Lengths around the limits of runs, the largest nodes of the tree.
lengths = st.sampled_from([1, RUN_BLOCKS - 1, RUN_BLOCKS, RUN_BLOCKS + 1, 2 * RUN_BLOCKS, 2 * RUN_BLOCKS + 500])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(lengths, st.integers(0, 2)), min_size=1, max_size=4), lengths)
def test_long_prompts_match_across_runs(prompts: list[tuple[int, int]], asked: int) -> None:
    """Each target holds its own prompt. Prompts share a first part of varying length."""
    index = make_index()
    targets = [Target(str(number), 0, "m") for number in range(len(prompts))]
    long = [[0] * blocks + [1 + branch] * 600 for blocks, branch in prompts]
    for target, prompt in zip(targets, long, strict=True):
        index.add(target)
        for start in range(0, len(prompt), 700):
            hashes: list[int | bytes] = list(range(start + 1, min(start + 700, len(prompt)) + 1))
            tokens = prompt[start : start + 700]
            apply(index, target, BlockStored(hashes, start or None, tokens, 1))
    question = [0] * asked + [1] * 700
    expected = {
        target: common
        for target, prompt in zip(targets, long, strict=True)
        if (
            common := next(
                (n for n, pair in enumerate(zip(prompt, question, strict=False)) if pair[0] != pair[1]),
                min(len(prompt), len(question)),
            )
        )
        > 0
    }
    assert match(index, question, Namespace("m", "default", None, None, 1)) == expected
    drop_all(index, *targets)
    assert index.runs == 0


def test_prompts_that_diverge_in_a_run_share_its_start(index: Index) -> None:
    long = list(range(2000))
    apply(index, A, BlockStored(list(range(1000)), None, long, 2))
    for parting in (1, 7, 500, 999):
        name = 10_000 + parting
        apply(index, B, BlockStored([name, name + 1], None, [*long[:2], 9, 9], 2))
        apply(index, A, BlockStored([name], parting - 1, [9, 9], 2))
        assert match(index, [*long[: 2 * parting], 9, 9])[A] == 2 * parting + 2
    assert match(index, long)[A] == 2000


def test_blocks_stored_again_from_the_start_are_no_copies(index: Index) -> None:
    apply(index, A, stored([1, 2, 3], PROMPT[:6]), stored([1, 2], PROMPT[:4]))
    apply(index, A, BlockRemoved([2]))
    assert match(index) == {A: 2}
    assert blocks(index) == {Tier.GPU: 2}


def window(hashes: list[Any], tokens: list[int], group: int = 0) -> BlockStored:
    """Return the event of blocks in a group whose window of four tokens needs the last two blocks."""
    return BlockStored(
        hashes,
        None,
        tokens,
        2,
        medium="GPU",
        group_idx=group,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=4,
    )


def test_hit_ends_where_window_groups_have_its_last_blocks(index: Index) -> None:
    whole = stored([1, 2, 3, 4], PROMPT, group_idx=1, medium="GPU", kv_cache_spec_kind="full_attention")
    apply(index, A, window([3, 4], PROMPT), whole)  # the window group stores its last blocks before the prefix
    assert match(index) == {A: 8}
    assert match(index, PROMPT[:6]) == {}, "blocks 2 and 3 would be needed, 2 is not there"
    apply(index, A, window([1, 2], PROMPT))
    assert match(index, PROMPT[:6]) == {A: 6}
    assert match(index, PROMPT[:2]) == {A: 2}, "a prompt shorter than the window needs all its blocks"
    apply(index, A, BlockRemoved([4], "GPU", 0))
    assert match(index) == {A: 6}, "the whole-prefix group still has block 4"
    apply(index, A, BlockRemoved([1], "GPU", 1))
    assert match(index) == {}


@pytest.mark.parametrize("group", [0, 1])
def test_prefix_counts_while_all_full_attention_groups_hold_it(index: Index, group: int) -> None:
    for number in (0, 1):
        kind = {"group_idx": number, "kv_cache_spec_kind": "full_attention"}
        apply(index, A, stored([1, 2, 3, 4], PROMPT, medium="GPU", **kind))
    assert match(index) == {A: 8}
    apply(index, A, BlockRemoved([4], "GPU", group))
    assert match(index) == {A: 6}
    apply(index, A, BlockRemoved([1, 2, 3], "GPU", group))
    assert match(index) == {}


def test_state_group_needs_the_state_after_the_last_block(index: Index) -> None:
    state = BlockStored([2], None, PROMPT, 2, medium="GPU", group_idx=0, kv_cache_spec_kind="mamba")
    apply(index, A, stored([1, 2, 3, 4], PROMPT, group_idx=1, medium="GPU"), state)
    assert match(index) == {A: 4}


def test_group_of_unknown_kind_is_counted_and_ignored(index: Index) -> None:
    unknown = BlockStored([1], None, PROMPT, 2, medium="GPU", group_idx=1, kv_cache_spec_kind="crystal_ball")
    apply(index, A, stored([1, 2], PROMPT[:4]), unknown)
    assert match(index) == {A: 4}
    status = index.status(A)
    assert status is not None
    assert status.counters.ignored == 1


def test_window_block_removed_before_its_prefix_is_not_held(index: Index) -> None:
    whole = stored([1, 2, 3, 4], PROMPT, group_idx=1, medium="GPU")
    apply(index, A, window([3, 4], PROMPT), BlockRemoved([4], "GPU", 0), whole)
    assert match(index) == {}


def test_holdings_never_exceed_the_capacity() -> None:
    index = make_index()
    index.add(A, capacity=3)
    apply(index, A, stored([1, 2, 3], PROMPT[:6]), stored([7, 8], [7, 7, 8, 8]))
    assert blocks(index) == {Tier.GPU: 3}
    assert match(index, [7, 7, 8, 8]) == {A: 4}
    assert match(index) == {A: 2}, "the oldest prompt loses its end"


def test_orphans_of_one_parent_are_limited() -> None:
    index = make_index(orphan_blocks=4)
    index.add(A)
    for _ in range(3):
        apply(index, A, stored([2], PROMPT[2:4], 1), BlockRemoved([2], "GPU"), BlockRemoved([2], "GPU"))
    status = index.status(A)
    assert status is not None
    assert status.counters.orphans_dropped > 0
    apply(index, A, stored([1], PROMPT[:2]))
    assert match(index) == {A: 2}


def test_blocks_beyond_the_capacity_are_dropped_from_the_ends() -> None:
    """The oldest blocks are dropped last if other blocks follow them."""
    index = make_index()
    index.add(A, capacity=4)
    apply(index, A, stored([1, 2], PROMPT[:4]), stored([3], [5, 5], 2), stored([4], [6, 6], 2), stored([5], [7, 7], 2))
    assert match(index, [*PROMPT[:4], 5, 5]) == {A: 4}
    assert match(index, [*PROMPT[:4], 6, 6]) == {A: 6}
    assert match(index, [*PROMPT[:4], 7, 7]) == {A: 6}


numbers = st.integers(-(2**63), 2**64 - 1)
names = st.none() | st.text(max_size=3)
anything = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
blocks_named = st.lists(st.integers(0, 5) | st.binary(max_size=1), max_size=3)
any_event = st.one_of(
    st.builds(
        BlockStored,
        blocks_named,
        st.none() | st.integers(0, 5),
        st.lists(st.integers(0, 1), max_size=4) | st.lists(numbers, max_size=2),
        st.integers(-1, 3),
        lora_id=st.none() | numbers,
        medium=st.sampled_from([None, "GPU", "CPU", "CXL"]),
        lora_name=names,
        extra_keys=st.none() | st.lists(st.none() | st.lists(anything, max_size=2), max_size=3),
        group_idx=st.none() | st.integers(-1, 2),
        kv_cache_spec_kind=st.sampled_from([None, "full_attention", "sliding_window", "mamba", "new"]),
        kv_cache_spec_sliding_window=st.none() | numbers,
        cache_salt=names,
    ),
    st.builds(BlockRemoved, blocks_named, st.sampled_from([None, "GPU", "CPU"]), st.none() | st.integers(-1, 2)),
    st.builds(AllBlocksCleared, st.sampled_from([None, "GPU", "CPU", "CXL"])),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(any_event, max_size=12))
def test_random_events_keep_the_index_consistent(events: list[Event]) -> None:
    index = make_index(orphan_blocks=4)
    index.add(A)
    apply(index, A, *events)
    for tokens in ([0, 0, 0, 0], [0, 1, 0, 1]):
        for block_size in (1, 2):
            match(index, tokens, Namespace("m", "default", None, None, block_size))
    drop_all(index, A)
    assert index.runs == 0


HASH_BYTES = 8


def hashed(index: Index, tokens: list[int]) -> int:
    """Return the number of blocks that a match hashes. A second match hashes no further blocks."""
    prompt = PackedPrompt(pack_tokens(tokens))
    first = index.match(BASE, prompt)
    count = prompt.hash_bytes
    assert index.match(BASE, prompt) == first
    assert prompt.hash_bytes == count
    return count // HASH_BYTES


def test_unknown_prompt_hashes_one_block_only(index: Index) -> None:
    assert hashed(index, [9] * 1000) == 1
    apply(index, A, stored([1, 2, 3, 4], PROMPT))
    assert hashed(index, [9] * 1000) == 1


def test_hashing_stops_soon_after_the_last_match(index: Index) -> None:
    tokens = list(range(2 * 300))
    apply(index, A, stored(list(range(100)), tokens[:200]))
    apply(index, B, stored(list(range(200)), tokens[:400]))
    assert hashed(index, tokens) == 201
    assert hashed(index, tokens[:20] + [9] * 1000) <= 4 * 10


def test_blocks_beyond_all_targets_are_not_hashed(index: Index) -> None:
    tokens = list(range(2 * 2 * RUN_BLOCKS))
    apply(index, A, stored(list(range(2 * RUN_BLOCKS)), tokens))
    apply(index, B, stored(list(range(2 * RUN_BLOCKS)), tokens))
    assert hashed(index, tokens) == 2 * RUN_BLOCKS
    for target in (A, B):
        apply(index, target, BlockRemoved([RUN_BLOCKS - 1]))  # both targets hold the rest, which no hit reaches
    assert hashed(index, tokens) == RUN_BLOCKS


def test_prompt_is_hashed_once_per_block_size(index: Index) -> None:
    apply(index, A, stored([1, 2, 3, 4], PROMPT))
    apply(index, B, BlockStored([1, 2], None, PROMPT, 4))
    prompt = PackedPrompt(pack_tokens([*PROMPT, *PROMPT]))
    assert [found.target for found in index.match(BASE, prompt)] == [A]
    assert [found.target for found in index.match(BASE._replace(block_size=4), prompt)] == [B]
    assert prompt.hash_bytes == (5 + 3) * HASH_BYTES


@pytest.mark.parametrize("window_first", [True, False])
def test_window_group_may_have_smaller_blocks_than_whole_prefixes(index: Index, window_first: bool) -> None:
    """The hash of a window block that ends with a whole block is that of the whole block, as vLLM makes them."""
    tokens = list(range(64))
    namespace = Namespace("m", "default", None, None, 16)
    small = {"block_size": 4, "group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 8}
    whole = BlockStored([16, 32, 48, 64], None, tokens, 16, group_idx=0)
    window = BlockStored([60, 64], 56, tokens[56:], **small)
    second = BlockStored([28, 32], 24, tokens[24:32], **small)
    apply(index, A, *([window, second, whole] if window_first else [whole, window, second]))
    assert match(index, tokens, namespace) == {A: 64}
    assert match(index, tokens[:63], namespace) == {A: 32}  # the blocks before 48 left the window
    apply(index, A, BlockRemoved([60, 64], group_idx=1))
    assert match(index, tokens, namespace) == {A: 32}
    apply(index, A, BlockRemoved([28, 32], group_idx=1))
    assert match(index, tokens, namespace) == {}


def test_window_that_reaches_into_several_whole_blocks_needs_them(index: Index) -> None:
    tokens = list(range(64))
    namespace = Namespace("m", "default", None, None, 16)
    small = {
        "block_size": 8,
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 32,
    }
    apply(index, A, BlockStored([16, 32, 48, 64], None, tokens, 16, group_idx=0))
    apply(index, A, BlockStored([56, 64], 48, tokens[48:], **small))
    apply(index, A, BlockStored([8, 16], None, tokens[:16], **small))
    assert match(index, tokens, namespace) == {A: 16}
    apply(index, A, BlockStored([40, 48], 32, tokens[32:48], **small))
    assert match(index, tokens, namespace) == {A: 64}
