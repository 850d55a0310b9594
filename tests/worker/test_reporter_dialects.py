"""The output of a reporter is read by the decoders of real releases."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from engine_schemas import RELEASES, StandardBatch

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
from worker import EventPublisher, Reporter

pytestmark = pytest.mark.usefixtures("steps_only")

TOKENS = [5, 70_000, 2**31]


class Wire(EventPublisher):
    """A publisher that keeps the encoded batches."""

    def __init__(self, wire_form: WireForm) -> None:
        super().__init__(3)
        self.wire_form = wire_form
        self.payloads: list[bytes] = []

    def publish(self, batch: EventBatch) -> None:
        self.payloads.append(encode_batch(EventBatch(batch.ts, batch.events, self.dp_rank), self.wire_form))

    def shutdown(self) -> None:
        return


def reported(form: WireForm, *calls: tuple[str, tuple[Any, ...], dict[str, Any]]) -> tuple[Reporter, bytes]:
    """The batch of one step. It begins with the clear that begins every stream."""
    wire = Wire(form)
    reporter = Reporter(wire)
    for name, arguments, options in calls:
        getattr(reporter, name)(*arguments, **options)
    reporter.step()
    reporter.shutdown()
    return reporter, wire.payloads[0]


def a_life(form: WireForm) -> bytes:
    """Report stored blocks, a removal and a clear, with a salt if the dialect can express it."""
    _, payload = reported(
        form,
        ("stored", ([2**63 - 1, 8], None, [*TOKENS, 9], 2), {"cache_salt": "tenant"}),
        ("stored", ([9], 8, [1, 2], 2), {}),
        ("stored", ([10], None, [3, 4], 2), {"lora_id": 7}) if form is not WireForm.STANDARD else ("step", (), {}),
        ("removed", ([9],), {}),
        ("cleared", (), {}),
    )
    return payload


@pytest.mark.parametrize(("engine", "release"), RELEASES)
def test_release_reads_its_own_dialect(engine: str, release: str) -> None:
    form, batch_type = RELEASES[engine, release]
    batch = msgspec.msgpack.decode(a_life(form), type=batch_type)
    kinds = [type(event).__name__ for event in batch.events]
    assert kinds == ["AllBlocksCleared", *["BlockStored"] * 3, "BlockRemoved", "AllBlocksCleared"]
    salted, follows, adapted, removed = batch.events[1:5]
    assert (salted.block_hashes, salted.parent_block_hash, salted.block_size) == ([2**63 - 1, 8], None, 2)
    assert salted.token_ids == [*TOKENS, 9]
    assert (follows.parent_block_hash, adapted.lora_id, removed.block_hashes) == (8, 7, [9])
    for rank in {"data_parallel_rank", "attn_dp_rank"} & set(batch.__struct_fields__):
        assert getattr(batch, rank) == 3
    for event in (salted, removed):
        if "medium" in event.__struct_fields__:
            assert event.medium == "GPU"
    if "extra_keys" in salted.__struct_fields__:
        assert (salted.extra_keys, follows.extra_keys) == ([("tenant",), None], None)
    if "metadata" in salted.__struct_fields__:
        assert (salted.metadata, follows.metadata) == ({"cache_salt": "tenant"}, None)
    if "cache_salt" in salted.__struct_fields__:
        assert (salted.cache_salt, follows.cache_salt) == ("tenant", None)


def test_standard_reader_reads_dialect() -> None:
    _, payload = reported(
        WireForm.STANDARD,
        ("stored", ([7, 8], None, [1, 2, 3, 4], 2), {"cache_salt": "tenant", "lora_name": "sql", "medium": "CPU"}),
        ("removed", ([8],), {"medium": "CPU"}),
    )
    batch = msgspec.msgpack.decode(payload, type=StandardBatch)
    cleared, stored, removed = batch.events
    assert (batch.dp_rank, cleared.event_type, removed.event_type) == (3, "cleared", "removed")
    assert (stored.event_type, stored.seq_hashes, stored.token_ids) == ("stored", [7, 8], [1, 2, 3, 4])
    assert (stored.base_block_idx, stored.medium, stored.lora_name) == (0, "cpu", "sql")
    assert (stored.additional_salt, removed.seq_hashes, removed.medium) == ("tenant", [8], "cpu")


EVERYTHING = {
    "lora_name": "sql",
    "extra_keys": [["sql", "image"], ["sql"]],
    "group_idx": 1,
    "kv_cache_spec_kind": "full_attention",
    "session_id": "s",
}


@pytest.mark.parametrize("form", [WireForm.VLLM_MAPS, WireForm.VLLM_ARRAYS, WireForm.SGLANG_MAPS])
def test_adapters_images_and_groups_are_reported(form: WireForm) -> None:
    _, payload = reported(form, ("stored", ([1, 2], None, [1, 2], 1), EVERYTHING))
    (_, stored) = decode_batch(payload).events
    assert isinstance(stored, BlockStored)
    assert (stored.lora_name, stored.extra_keys, stored.group_idx) == ("sql", [["sql", "image"], ["sql"]], 1)


@pytest.mark.parametrize(
    ("form", "what"),
    [
        (WireForm.SGLANG_ARRAYS, {"lora_name": "sql"}),
        (WireForm.SGLANG_ARRAYS, {"extra_keys": [["image"]]}),
        (WireForm.SGLANG_ARRAYS, {"group_idx": 1}),
        (WireForm.STANDARD, {"extra_keys": [["image"]]}),
        (WireForm.STANDARD, {"lora_id": 1}),
        (WireForm.STANDARD, {"kv_cache_spec_kind": "mamba"}),
    ],
)
def test_inexpressible_block_is_not_reported(form: WireForm, what: dict[str, Any]) -> None:
    """Blocks after an inexpressible one are not reported either, until it is removed."""
    group = {"group_idx": what.get("group_idx")}
    reporter, payload = reported(
        form,
        ("stored", ([1], None, [1], 1), what),
        ("stored", ([2], 1, [2], 1), group),
        ("stored", ([3], None, [3], 1), {}),
        ("removed", ([1],), group),
        ("removed", ([2],), group),
        ("stored", ([1], None, [1], 1), {}),
    )
    told: list[Event] = [AllBlocksCleared(), *(BlockStored([n], None, [n], 1, medium="GPU") for n in (3, 1))]
    assert decode_batch(payload).events == told
    assert reporter.unreported == 2
    assert reporter.unknown_removed == 0


@pytest.mark.parametrize("form", WireForm)
def test_clear_of_medium_is_reported_as_removals(form: WireForm) -> None:
    """Most decoders know a clear of everything only."""
    _, payload = reported(
        form,
        ("stored", ([1, 2], None, [1, 2], 1), {}),
        ("stored", ([1, 2], None, [1, 2], 1), {"medium": "CPU"}),
        ("cleared", ("CPU",), {}),
    )
    assert decode_batch(payload).events[-1] == BlockRemoved([1, 2], "CPU")
