"""Batches of all engines are decoded, and an unreadable event is rejected without the others."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvevents import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    MalformedBatchError,
    WireForm,
    decode_batch,
    encode_batch,
)
from kvevents.batches import batch_time

encode = msgspec.msgpack.encode

u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
hashes = st.one_of(u64, i64, st.binary(min_size=32, max_size=32))
names = st.none() | st.text(max_size=8)
extra_keys = st.none() | st.lists(st.none() | st.lists(st.text(max_size=4) | i64 | st.binary(max_size=4), max_size=2))
stored = st.builds(
    BlockStored,
    block_hashes=st.lists(hashes, max_size=3),
    parent_block_hash=st.none() | hashes,
    token_ids=st.lists(st.integers(0, 2**32 - 1), max_size=6),
    block_size=st.integers(0, 128),
    lora_id=st.none() | st.integers(0, 9),
    medium=names,
    lora_name=names,
    extra_keys=extra_keys,
    group_idx=st.none() | st.integers(0, 9),
    kv_cache_spec_kind=names,
    kv_cache_spec_sliding_window=st.none() | st.integers(0, 4096),
    cache_salt=names,
    session_id=names,
)
removed = st.builds(
    BlockRemoved,
    block_hashes=st.lists(hashes, max_size=3),
    medium=names,
    group_idx=st.none() | st.integers(0, 9),
)
cleared = st.builds(AllBlocksCleared, medium=names)
batches = st.builds(
    EventBatch,
    ts=st.floats(0, 2e9),
    events=st.lists(st.one_of(stored, removed, cleared), max_size=4),
    dp_rank=st.none() | st.integers(0, 63),
    rejected=st.just([]),
)
anything = st.recursive(
    st.none() | st.booleans() | i64 | st.floats(allow_nan=False) | st.text(max_size=12) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=12), inner, max_size=5),
    max_leaves=20,
)

# Fields that the array forms of both engines do not have.
NOT_IN_VLLM_ARRAYS = ("cache_salt", "session_id")
NOT_IN_SGLANG_ARRAYS = (
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "session_id",
)


def decode_events(*events: Any) -> EventBatch:
    return decode_batch(encode([1.5, list(events), 0]))


def without(batch: EventBatch, fields: tuple[str, ...]) -> EventBatch:
    """Draw a batch whose events lack these fields, and whose clear events apply to all media."""
    events = [
        AllBlocksCleared()
        if isinstance(event, AllBlocksCleared)
        else msgspec.structs.replace(event, **{name: None for name in fields if hasattr(event, name)})
        for event in batch.events
    ]
    return EventBatch(batch.ts, events, batch.dp_rank)


@given(batches, st.sampled_from([WireForm.VLLM_MAPS, WireForm.SGLANG_MAPS]))
def test_tagged_maps_round_trip(batch: EventBatch, form: WireForm) -> None:
    assert decode_batch(encode_batch(batch, form)) == batch


@given(batches)
def test_vllm_arrays_have_all_fields(batch: EventBatch) -> None:
    assert decode_batch(encode_batch(batch, WireForm.VLLM_ARRAYS)) == without(batch, NOT_IN_VLLM_ARRAYS)


@given(batches)
def test_sglang_arrays_end_with_the_salt(batch: EventBatch) -> None:
    assert decode_batch(encode_batch(batch, WireForm.SGLANG_ARRAYS)) == without(batch, NOT_IN_SGLANG_ARRAYS)


def test_position_7_is_vllms_adapter_or_sglangs_salt() -> None:
    fields = [[11], None, [1, 2], 2, None, "GPU"]
    vllm, sglang = decode_events(
        ["BlockStored", *fields, "my-lora"], ["BlockStored", *fields, {"cache_salt": "t"}]
    ).events
    assert isinstance(vllm, BlockStored)
    assert isinstance(sglang, BlockStored)
    assert (vllm.lora_name, vllm.cache_salt) == ("my-lora", None)
    assert (sglang.lora_name, sglang.cache_salt) == (None, "t")


def test_invalid_salt_rejects_its_event() -> None:
    batch = decode_events(["BlockStored", [11], None, [1, 2], 2, None, "GPU", {"cache_salt": 5}])
    assert batch.events == []
    assert [event.index for event in batch.rejected] == [0]


@pytest.mark.parametrize(
    ("event", "read"),
    [
        (["BlockStored", [1], None, [5, 6], 2], BlockStored([1], None, [5, 6], 2)),
        (["BlockStored", [1], 7, [5, 6], 2, 3], BlockStored([1], 7, [5, 6], 2, lora_id=3)),
        (["BlockRemoved", [1]], BlockRemoved([1])),
        (["BlockRemoved", [1], "CPU"], BlockRemoved([1], "CPU")),
        (["AllBlocksCleared"], AllBlocksCleared()),
        (["AllBlocksCleared", "GPU"], AllBlocksCleared("GPU")),
        ({"type": "BlockStored", "block_hashes": [1]}, BlockStored([1])),
        ({"type": "BlockRemoved", "block_hashes": [1]}, BlockRemoved([1])),
        ({"type": "AllBlocksCleared"}, AllBlocksCleared()),
    ],
)
def test_fields_missing_in_older_releases_are_optional(event: Any, read: Any) -> None:
    assert decode_events(event).events == [read]


@pytest.mark.parametrize(
    ("event", "read"),
    [
        ({"type": "BlockRemoved", "block_hashes": [1], "locality": "local", "x": {"y": [1]}}, BlockRemoved([1])),
        (["BlockRemoved", [1], "GPU", 0, "new", {"y": 1}], BlockRemoved([1], "GPU", 0)),
        ({"type": "AllBlocksCleared", "ownership": None}, AllBlocksCleared()),
    ],
)
def test_fields_of_newer_releases_are_ignored(event: Any, read: Any) -> None:
    assert decode_events(event).events == [read]


def test_maps_and_arrays_may_share_a_batch() -> None:
    batch = decode_events(["BlockRemoved", [1]], {"type": "BlockRemoved", "block_hashes": [2]})
    assert batch.events == [BlockRemoved([1]), BlockRemoved([2])]


@pytest.mark.parametrize("rank", [[], [None]])
def test_rank_may_be_missing_or_null(rank: list[None]) -> None:
    assert decode_batch(encode([1.5, [["AllBlocksCleared"]], *rank])) == EventBatch(1.5, [AllBlocksCleared()])


def test_rank_is_read_and_later_elements_are_ignored() -> None:
    assert decode_batch(encode([2, [], 3, "more"])) == EventBatch(2.0, [], 3)


@pytest.mark.parametrize("block", [0, 2**64 - 1, -(2**63), b"\x01" * 32])
@pytest.mark.parametrize("form", list(WireForm))
def test_block_hash_is_any_64_bit_number_or_bytes(block: int | bytes, form: WireForm) -> None:
    batch = EventBatch(1.0, [BlockStored([block], block, [1], 1), BlockRemoved([block])])
    assert decode_batch(encode_batch(batch, form)) == batch


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "BlockMoved", "block_hashes": [1]},
        ["BlockMoved", [1]],
        {"block_hashes": [1]},
        {"type": "BlockStored"},
        {"type": "BlockStored", "block_hashes": "1"},
        {"type": "BlockStored", "block_hashes": [1.5]},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [[1, 2]]},
        ["BlockStored"],
        ["BlockStored", [1], None, "tokens", 2],
        {"type": "BlockRemoved", "block_hashes": [1], "medium": msgspec.Raw(b"\xa1\xff")},
        {"type": "BlockStored", "block_hashes": [1], "extra_keys": [[msgspec.Raw(b"\x81\x80\x01")]]},
        [],
        {},
        None,
        5,
        "BlockStored",
    ],
)
@pytest.mark.parametrize("good", [["BlockRemoved", [1]], {"type": "BlockRemoved", "block_hashes": [1]}])
def test_unreadable_event_is_rejected_alone(bad: Any, good: Any) -> None:
    batch = decode_events(good, bad, good)
    assert batch.events == [BlockRemoved([1])] * 2
    assert [event.index for event in batch.rejected] == [1]
    assert batch.rejected[0].reason


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        encode(None),
        encode("text"),
        encode({"ts": 1.0, "events": []}),
        encode([]),
        encode([1.0]),
        encode(["now", []]),
        encode([1.0, {}]),
        encode([1.0, [], "rank"]),
        encode([1.0, []]) + b"\x00",
        encode([1.0, [["BlockRemoved", [1]]]])[:-1],
        b"\x91" * 100_000 + b"\x01",
        encode([1.0, [msgspec.Raw(b"\x91" * 100_000 + b"\x01")]]),
    ],
)
def test_payload_without_batch_is_malformed(payload: bytes) -> None:
    with pytest.raises(MalformedBatchError):
        decode_batch(payload)


@given(st.one_of(st.binary(max_size=64), anything.map(encode), st.lists(anything, max_size=4).map(encode)))
@example(b"\x92\xcb")
def test_random_bytes_are_a_batch_or_malformed(payload: bytes) -> None:
    try:
        batch = decode_batch(payload)
    except MalformedBatchError:
        return
    assert batch_time(payload) == batch.ts


@given(batches, st.sampled_from(WireForm), st.data())
def test_damaged_batch_is_a_batch_or_malformed(batch: EventBatch, form: WireForm, data: st.DataObject) -> None:
    payload = bytearray(encode_batch(batch, form))
    for at in data.draw(st.lists(st.integers(0, len(payload) - 1), max_size=4)):
        payload[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(MalformedBatchError):
        decode_batch(bytes(payload))


@given(st.lists(anything, max_size=5))
def test_every_event_of_a_batch_is_either_read_or_rejected(events: list[Any]) -> None:
    batch = decode_events(*events)
    assert len(batch.events) + len(batch.rejected) == len(events)


def test_batch_time_is_read_without_decoding() -> None:
    assert batch_time(encode([12.5, ["no event"]])) == batch_time(encode([12.5, [0] * 16])) == 12.5
    assert batch_time(encode([12, ["no event"]])) == 12


@pytest.mark.parametrize("batch", ["now", ["now", []], [12.5], [12], [12.5, "no events"], [12, 0], [12.5, None]])
def test_payload_without_batch_has_no_time(batch: Any) -> None:
    assert batch_time(encode(batch)) is None
    assert batch_time(b"\xc1") is None


@pytest.mark.parametrize(
    ("form", "event", "sent"),
    [
        (WireForm.VLLM_MAPS, AllBlocksCleared(), {"type": "AllBlocksCleared"}),
        (
            WireForm.VLLM_MAPS,
            BlockStored([1], None, [5], 1),
            {
                "type": "BlockStored",
                "block_hashes": [1],
                "parent_block_hash": None,
                "token_ids": [5],
                "block_size": 1,
                "lora_id": None,
                "medium": None,
                "lora_name": None,
            },
        ),
        (
            WireForm.SGLANG_MAPS,
            BlockStored([1], 2, [5], 1, medium="GPU", cache_salt="t"),
            {
                "type": "BlockStored",
                "block_hashes": [1],
                "parent_block_hash": 2,
                "token_ids": [5],
                "block_size": 1,
                "lora_id": None,
                "medium": "GPU",
                "cache_salt": "t",
            },
        ),
        (WireForm.SGLANG_ARRAYS, BlockStored([1], 2, [5], 1), ["BlockStored", [1], 2, [5], 1, None, None]),
        (WireForm.SGLANG_ARRAYS, BlockRemoved([1], "GPU"), ["BlockRemoved", [1], "GPU"]),
        (WireForm.VLLM_ARRAYS, BlockRemoved([1], "GPU", 2), ["BlockRemoved", [1], "GPU", 2]),
        (WireForm.VLLM_ARRAYS, AllBlocksCleared(), ["AllBlocksCleared"]),
    ],
)
def test_events_have_the_layout_of_the_engines_decoders(form: WireForm, event: Any, sent: Any) -> None:
    assert msgspec.msgpack.decode(encode_batch(EventBatch(1.0, [event], 3), form)) == [1.0, [sent], 3]


@pytest.mark.parametrize("name", BlockStored.__struct_fields__[1:])
def test_null_field_equals_a_missing_field(name: str) -> None:
    fields = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": 6, "token_ids": [1, 2], "block_size": 2}
    missing = {key: value for key, value in fields.items() if key != name}
    null, without = decode_events(fields | {name: None}), decode_events(missing)
    assert null.rejected == without.rejected == []
    assert null.events == without.events


@pytest.mark.parametrize("tag", [["BlockStored"], {"a": 1}, 7, None, b"BlockStored"])
def test_invalid_tag_rejects_its_event_alone(tag: Any) -> None:
    batch = decode_events({"type": tag, "block_hashes": [7]}, {"type": "AllBlocksCleared"})
    assert [event.index for event in batch.rejected] == [0]
    assert batch.events == [AllBlocksCleared()]


STANDARD = {
    "event_id": 42,
    "timestamp": 1739145600000,
    "event_type": "stored",
    "model_name": "m",
    "block_size": 2,
    "additional_salt": "tenant-1",
    "lora_name": "sql",
    "backend_id": "pool-0",
    "medium": "gpu",
    "dp_rank": 0,
    "seq_hashes": [7, 8],
    "base_block_idx": 0,
    "parent_hash": None,
    "token_ids": [1, 2, 3, 4],
}


@pytest.mark.parametrize(
    ("changes", "event"),
    [
        (
            {},
            BlockStored([7, 8], None, [1, 2, 3, 4], 2, medium="GPU", lora_name="sql", cache_salt="tenant-1"),
        ),
        (
            {"parent_hash": 6, "base_block_idx": 3, "lora_name": None, "additional_salt": None, "medium": "disk"},
            BlockStored([7, 8], 6, [1, 2, 3, 4], 2, medium="DISK"),
        ),
        (
            {"token_ids": None, "medium": "cpu", "lora_name": None, "additional_salt": None, "base_block_idx": 5},
            BlockStored([7, 8], None, [], 2, medium="CPU"),
        ),
        ({"event_type": "removed"}, BlockRemoved([7, 8], "GPU")),
        ({"event_type": "cleared", "medium": None}, AllBlocksCleared()),
        # The form of Mooncake's master: its own `type`, and null for unknown fields.
        ({"type": "kv_event", "event_type": "removed", "block_size": None}, BlockRemoved([7, 8], "GPU")),
        ({"type": "BlockStored", "event_type": "removed"}, BlockRemoved([7, 8], "GPU")),
        ({"event_type": "cleared", "medium": None, "seq_hashes": None}, AllBlocksCleared()),
        (
            {"block_size": None, "lora_name": None, "additional_salt": None, "model_name": None, "backend_id": None},
            BlockStored([7, 8], None, [1, 2, 3, 4], 2, medium="GPU"),
        ),
    ],
)
def test_standard_map_equals_the_engines_event(changes: dict[str, Any], event: Event) -> None:
    batch = decode_events(STANDARD | changes, {"type": "AllBlocksCleared"})
    assert (batch.events, batch.rejected) == ([event, AllBlocksCleared()], [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"event_type": "forgotten"}, "event_type"),
        ({"base_block_idx": 3}, "prefix is unknown"),
        ({"seq_hashes": "7"}, "seq_hashes"),
    ],
)
def test_invalid_standard_map_is_rejected(changes: dict[str, Any], reason: str) -> None:
    (rejected,) = decode_events(STANDARD | changes).rejected
    assert reason in rejected.reason


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [[5, 6], [6, 7]], "block_size": 2},
        ["BlockStored", [1], None, [[5, 6], [6, 7]], 2, None, "GPU"],
    ],
)
def test_token_pairs_are_rejected_with_their_reason(event: Any) -> None:
    batch = decode_events(event, {"type": "AllBlocksCleared"})
    assert batch.events == [AllBlocksCleared()]
    assert "EAGLE" in batch.rejected[0].reason
