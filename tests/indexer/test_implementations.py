"""The native core and the core in Python have the same results for all events that engines may send."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from indexer import Index, Target
from indexer.dump import DumpedHolder, DumpedRun, DumpedStream, DumpError, TargetDump
from indexer.hashing import Namespace, PackedPrompt, namespace_hash, pack_tokens
from indexer.index import Applied
from indexer.indexer import make_index
from indexer.native import CORE_VARIABLE, CORES, core_name
from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    MalformedBatchError,
    Tier,
    WireForm,
    encode_batch,
)

pytestmark = pytest.mark.skipif("native" not in CORES, reason="the native core is not built")

A, B = Target("a", 0, "m"), Target("b", 0, "m", "acme")

numbers = st.integers(-(2**63), 2**64 - 1)
names = st.integers(-2, 9) | st.sampled_from([b"x", b"y" * 32])
keys = st.recursive(
    st.sampled_from(["sql", "salt", "é"]) | st.none() | st.booleans() | numbers | st.floats() | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)
media = st.sampled_from([None, None, None, "GPU", "CPU", "CXL", ""])
groups = st.sampled_from([None, None, None, None, 0, 1, 2])


@st.composite
def stored(draw: st.DrawFn) -> BlockStored:
    """Draw blocks of a prompt of ones and twos. Few hashes are used, so that events refer to each other."""
    block_size = draw(st.sampled_from([1, 2, 2, 2, 3]))
    hashes = draw(st.lists(names, min_size=0, max_size=4))
    count = len(hashes) * block_size + draw(st.sampled_from([0] * 12 + [1]))
    with_keys = draw(st.integers(0, 5)) == 0
    return BlockStored(
        list(hashes),
        draw(st.none() | names),
        draw(st.lists(st.integers(1, 2), min_size=count, max_size=count)) if draw(st.integers(0, 9)) else [],
        draw(st.sampled_from([block_size] * 9 + [0])),
        lora_id=draw(st.sampled_from([None] * 9 + [0, 4])),
        medium=draw(media),
        lora_name=draw(st.sampled_from([None] * 9 + ["sql", ""])),
        extra_keys=draw(st.lists(st.none() | st.lists(keys, max_size=2), max_size=4)) if with_keys else None,
        group_idx=draw(groups),
        kv_cache_spec_kind=draw(st.sampled_from([None] * 6 + ["full_attention", "sliding_window", "mamba", "new"])),
        kv_cache_spec_sliding_window=draw(st.sampled_from([None, 2, 4, 4, 2**63])),
        cache_salt=draw(st.sampled_from([None] * 9 + ["salt"])),
    )


events: st.SearchStrategy[Event] = st.one_of(
    stored(),
    stored(),
    stored(),
    st.builds(BlockRemoved, st.lists(names, max_size=3), media, groups),
    st.builds(AllBlocksCleared, st.none() | media),
)
junk = st.recursive(
    st.none() | st.booleans() | numbers | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def unusual_event(draw: st.DrawFn) -> Any:
    """Draw an event with one unknown field, or one field of any type."""
    fields = msgspec.to_builtins(draw(events), builtin_types=[bytes])
    field = draw(st.sampled_from([*BlockStored.__struct_fields__, "type", "event_type", "later"]))
    return {**fields, field: draw(junk)}


@st.composite
def payload(draw: st.DrawFn) -> bytes:
    batch = draw(st.lists(events, max_size=6))
    if draw(st.booleans()):
        return encode_batch(EventBatch(1.0, batch, 0), draw(st.sampled_from(WireForm)))
    mixed: list[Any] = [*batch, *draw(st.lists(unusual_event() | junk, max_size=2))]
    encoded = bytearray(msgspec.msgpack.encode([draw(st.sampled_from([1.0, 1, "x"])), draw(st.permutations(mixed)), 0]))
    for place, byte in draw(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=1)):
        encoded[place % len(encoded)] = byte
    return bytes(encoded)


steps = st.one_of(
    st.tuples(st.just("apply"), st.sampled_from([A, A, A, B]), payload()),
    st.tuples(st.just("clear"), st.sampled_from([A, B]), st.none()),
    st.tuples(st.just("drop"), st.sampled_from([A, B]), st.none()),
    st.tuples(st.just("restore"), st.sampled_from([A, B]), st.none()),
)


def index_of_each_core(**options: Any) -> Iterator[Index]:
    for core in ("python", "native"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(CORE_VARIABLE, core)
            assert core_name() == core
            yield make_index(**options)


def outcome(index: Index, target: Target, payload: bytes) -> tuple[Any, ...]:
    try:
        return comparable(index.apply_payload(target, payload))
    except MalformedBatchError as error:
        return comparable(error)


def comparable(applied: Applied | Exception) -> tuple[Any, ...]:
    if isinstance(applied, Exception):
        assert isinstance(applied, MalformedBatchError)
        return (str(applied),)
    return sorted(event.reason for event in applied.rejected), applied.cleared


def holdings(runs: list[DumpedRun], holders: list[DumpedHolder]) -> list[Any]:
    """Return the holders of a dump by prefix hash, because cores may divide blocks into different runs."""
    return [
        (
            holder.group,
            holder.medium,
            holder.window,
            [(name, runs[run].hashes[offset]) for name, run, offset in holder.blocks],
            sorted(holder.copies, key=str),
        )
        for holder in holders
    ]


def paths_of(runs: list[DumpedRun]) -> set[tuple[int, ...]]:
    """Return all prefixes of the runs' paths from the root, as hashes."""
    paths: list[tuple[int, ...]] = []
    for run in runs:
        before = paths[run.parent] if run.parent >= 0 else ()
        start = 0 if run.parent < 0 else len(before) - len(runs[run.parent].hashes) + run.offset + 1
        paths.append((*before[:start], *run.hashes))
    return {path[:end] for path in paths for end in range(1, len(path) + 1)}


def dump_of(target: Target, index: Index) -> TargetDump:
    status = index.status(target)
    assert status is not None
    return TargetDump(
        *(target.worker, target.dp_rank, target.model, target.tenant, "", "", None, "", None, None, None),
        sorted(status.block_sizes),
        DumpedStream(0, 0.0),
        *index.dump(target),
    )


def matches(index: Index, namespace: Namespace, prompt: list[int]) -> dict[Target, Any]:
    found = index.match(namespace, PackedPrompt.of(prompt))
    return {match.target: (match.matched_tokens, match.tiers) for match in found}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(steps, min_size=1, max_size=12),
    st.sampled_from([None, 1, 3]),
    st.sampled_from([4, 100]),
    st.sampled_from([6, 1000]),
    st.lists(st.lists(st.integers(1, 2), max_size=9), min_size=2, max_size=4),
)
def test_both_implementations_agree(
    steps: list[tuple[str, Target, Any]],
    capacity: int | None,
    orphan_blocks: int,
    most_blocks: int,
    prompts: list[list[int]],
) -> None:
    python, native = index_of_each_core(secret="s", orphan_blocks=orphan_blocks, most_blocks=most_blocks)
    for index in (python, native):
        index.add(A, capacity=capacity)
        index.add(B, "sql")
    for verb, target, what in steps:
        if verb == "apply":
            assert outcome(python, target, what) == outcome(native, target, what)
        for index in (python, native):
            if verb == "clear":
                index.clear(target)
            elif verb == "drop":
                index.drop(target)
                index.add(target)
        if verb == "restore":  # each core restores the dump of the other one
            dumps = dump_of(target, python), dump_of(target, native)
            for index, dump in zip((native, python), dumps, strict=True):
                index.drop(target)
                index.add(target)
                index.restore(target, dump)
        for each in (A, B):
            assert python.status(each) == native.status(each)
            ours, theirs = python.dump(each), native.dump(each)
            assert holdings(*ours) == holdings(*theirs)
            assert paths_of(ours[0]) == paths_of(theirs[0])
        assert python.block_sizes([A, B]) == native.block_sizes([A, B])
        native.check_integrity()
        python.check_integrity()
        for prompt in prompts:
            for block_size in (1, 2, 3):
                for tenant, adapter in (("default", None), ("acme", "sql"), ("default", "sql")):
                    root = namespace_hash(Namespace("m", tenant, adapter, None, block_size), "s")
                    packed, blocks = PackedPrompt.of(prompt), len(prompt) // block_size
                    for tier in (None, Tier.CPU):
                        answers = [
                            sorted(
                                (m.target, m.matched_tokens, m.tiers)
                                for m in index.match_from(root, block_size, packed, blocks, tier)
                            )
                            for index in (python, native)
                        ]
                        assert answers[0] == answers[1]


@given(st.binary(max_size=1200), st.integers(0, 2**64 - 1))
def test_xxh3_equals_the_xxhash_package(data: bytes, seed: int) -> None:
    from indexer._native import xxh3_64

    assert xxh3_64(data, seed) == xxh3_64_intdigest(data, seed)


@pytest.mark.parametrize("size", [0, 1, 3, 4, 8, 9, 16, 17, 64, 128, 129, 240, 241, 512, 1024, 1025, 4096, 10_000])
def test_xxh3_covers_every_length_class(size: int) -> None:
    from indexer._native import xxh3_64

    data = bytes(number * 131 % 251 for number in range(size))
    assert xxh3_64(data, 2**63 + 5) == xxh3_64_intdigest(data, 2**63 + 5)


def test_both_implementations_reject_invalid_dumps() -> None:
    blocks: list[tuple[int | str, int, int]]
    for blocks in ([(1, 1, 0)], [(1, 0, 2)], [("hex:0", 0, 0)], [("hex:zz", 0, 0)], [(1, -1, 0)]):
        for index in index_of_each_core():
            index.add(A)
            dump = TargetDump(
                *("a", 0, "m", "default", "", "", None, "", None, None, None),
                [2],
                DumpedStream(0, 0.0),
                [DumpedRun(-1, -1, [5, 6])],
                [DumpedHolder(0, "GPU", None, blocks, [])],
            )
            with pytest.raises(DumpError):
                index.restore(A, dump)
            index.check_integrity()
            assert index.runs == 0


_TOKENS_AS_JSON = st.one_of(
    st.lists(st.integers(0, 2**32 + 2)).map(lambda ids: msgspec.json.format(msgspec.json.encode(ids))),
    st.lists(st.integers(0, 2**32 - 1)).map(msgspec.json.encode),
    st.text("[]0123456789,-. e", max_size=12).map(str.encode),
)


@given(_TOKENS_AS_JSON)
def test_native_packing_of_json_equals_pack_tokens(json: bytes) -> None:
    try:
        expected = pack_tokens(msgspec.json.decode(json, type=list[int]))
    except (msgspec.DecodeError, OverflowError):
        expected = None
    packed = import_module("indexer._native").packed_numbers(json)
    # Numbers like 1.0 and 1e2 are left to the complete parser.
    assert packed == expected or (packed is None and (b"." in json or b"e" in json))


@given(
    st.lists(st.integers(0, 9).flatmap(lambda digits: st.integers(10**digits - 1, min(10 ** (digits + 1), 2**32 - 1))))
)
def test_native_json_of_packed_tokens_equals_reference(ids: list[int]) -> None:
    json = import_module("indexer._native").numbers_json(pack_tokens(ids), b"{", b"}")
    assert json == b"{%b}" % msgspec.json.encode(ids)
