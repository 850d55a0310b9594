"""Blocks are only found with their whole identity: adapter, cache salt and keys of media, whatever reports them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from indexer import Index, MatchQuery, Target, make_index
from indexer.dump import DumpedStream, TargetDump
from indexer.hashing import MediaSpan, Namespace, PackedPrompt, namespace_hash, pack_tokens
from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    WireForm,
    decode_batch,
    encode_batch,
)

A = Target("a", 0, "m")
TOKENS = [1, 2, 3, 4, 5, 6]
IMAGE = (MediaSpan(2, 4, "cat"),)
QUERIES: dict[str, MatchQuery] = {
    "plain": MatchQuery("m", TOKENS),
    "salt": MatchQuery("m", TOKENS, cache_salt="s"),
    "adapter": MatchQuery("m", TOKENS, "sql"),
    "image": MatchQuery("m", PackedPrompt(pack_tokens(TOKENS), IMAGE)),
}
# The keys of three blocks in an engine's events about its own memory.
KEYS: dict[str, list[list[Any] | None]] = {
    "salt": [["s"], None, None],
    "adapter": [["sql"], ["sql"], ["sql"]],
    "image": [None, [("cat", 0)], None],
}
# Media whose events have no identity: copies on other memory of the worker, and in pools.
OWN, POOLED = ["CPU", "STORAGE", "FS", "storage", "CXL"], ["cpu", "disk", "SHARED_STORAGE", "obj", "EXTERNAL"]


def device_event(kind: str) -> BlockStored:
    return BlockStored([1, 2, 3], None, TOKENS, 2, medium="GPU", extra_keys=KEYS[kind])


def copies(medium: str, locality: str | None = None) -> list[BlockStored]:
    """Return the events of a connector that copies three blocks one by one."""
    parents = [None, 1, 2]
    return [
        BlockStored([name], parent, TOKENS[2 * name - 2 : 2 * name], 2, medium=medium, locality=locality)
        for name, parent in zip([1, 2, 3], parents, strict=True)
    ]


def index_with(*events: Event, form: WireForm = WireForm.VLLM_MAPS) -> Index:
    index = make_index()
    index.add(A)
    index.apply_payload(A, encode_batch(EventBatch(1.0, list(events)), form))
    return index


def held(index: Index, kind: str) -> int:
    """Return the tokens of one kind of prompt that A holds."""
    query = QUERIES[kind]
    root = namespace_hash(Namespace("m", "default", query.adapter, query.cache_salt, 2))
    found = index.match_from(root, 2, PackedPrompt.of(query.token_ids), 3)
    return sum(match.matched_tokens for match in found)


@pytest.mark.parametrize("form", [WireForm.VLLM_MAPS, WireForm.VLLM_ARRAYS])
@pytest.mark.parametrize("medium", OWN + POOLED)
@pytest.mark.parametrize("kind", KEYS)
def test_copy_without_identity_is_no_plain_block(kind: str, medium: str, form: WireForm) -> None:
    index = index_with(device_event(kind), *copies(medium), form=form)
    before_the_image = 2 if kind == "image" else 0
    assert {each: held(index, each) for each in QUERIES} == {
        "plain": before_the_image, "salt": 0, "adapter": 0, "image": before_the_image, kind: 6
    }  # fmt: skip
    index.apply(A, EventBatch(1.0, [BlockRemoved([1, 2, 3], "GPU")]))
    assert held(index, "plain") == (before_the_image if medium in OWN else 0)
    assert held(index, kind) == (6 if medium in OWN else 0), "only the worker's own copies are left"
    index.check_integrity()


@pytest.mark.parametrize("medium", OWN + POOLED)
def test_copy_of_unknown_block_is_not_held(medium: str) -> None:
    index = index_with(*copies(medium))
    assert held(index, "plain") == 0
    index.apply(A, EventBatch(1.0, [BlockStored([1], None, TOKENS[:2], 2), *copies(medium)]))
    assert held(index, "plain") == 2, "the identity of later blocks is unknown"
    assert index.dump(A)[0], "the block of the device is dumped"


@pytest.mark.parametrize("medium", POOLED)
def test_pooled_blocks_are_not_the_workers(medium: str) -> None:
    index = index_with(BlockStored([1, 2, 3], None, TOKENS, 2), *copies(medium), *copies("STORAGE", "REMOTE"))
    index.apply(A, EventBatch(1.0, [BlockRemoved([1, 2], medium), AllBlocksCleared(medium), BlockRemoved([3])]))
    status = index.status(A)
    assert status is not None
    assert (held(index, "plain"), sum(status.blocks.values()), status.orphans) == (4, 2, 0)
    assert (status.counters.ignored, status.counters.unknown_removed) == (8, 0)
    runs, holders = index.dump(A)
    assert [holder.medium for holder in holders] == ["GPU"]
    again = make_index()
    again.add(A)
    stream = DumpedStream(0, 0.0)
    again.restore(A, TargetDump("a", 0, "m", "default", "", "", None, "", None, None, None, [2], stream, runs, holders))
    assert held(again, "plain") == 4


@pytest.mark.parametrize("form", WireForm)
@pytest.mark.parametrize("salt", [None, "s"])
def test_copy_with_identity_is_held_at_once(form: WireForm, salt: str | None) -> None:
    """SGLang's media, the standard and a reporter name the salt, so that the copy needs no block on the device."""
    medium = "CPU_PINNED" if form in (WireForm.SGLANG_ARRAYS, WireForm.SGLANG_MAPS) else "CPU"
    keys: list[list[Any] | None] | None = None if medium == "CPU_PINNED" else [None] * 3
    event = BlockStored([1, 2, 3], None, TOKENS, 2, medium=medium, cache_salt=salt, extra_keys=keys)
    if form in (WireForm.VLLM_MAPS, WireForm.VLLM_ARRAYS) and salt:
        event = msgspec.structs.replace(event, cache_salt=None, extra_keys=[[salt], None, None])
    index = index_with(event, form=form)
    assert (held(index, "plain"), held(index, "salt")) == ((0, 6) if salt else (6, 0))
    assert decode_batch(encode_batch(EventBatch(1.0, [event]), form)).events
