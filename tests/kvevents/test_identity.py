"""Adapters and salts are read from all forms that engines send, and other keys are kept."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvevents import BlockStored
from kvevents.events import BlockIdentity, encode_keys, identity_of

IMAGE = ["0a1b", 12]  # the identifier of an image, and its offset in the block


def stored(*keys: list[Any] | None, parent: int | None = None, blocks: int | None = None, **fields: Any) -> BlockStored:
    count = len(keys) if blocks is None else blocks
    return BlockStored(list(range(1, count + 1)), parent, extra_keys=list(keys) or None, **fields)


def key(*keys: Any) -> bytes:
    return msgspec.msgpack.encode(list(keys))


def test_event_with_tokens_only_has_no_identity() -> None:
    for event in (stored(blocks=2), stored(None, None), stored([], None)):
        assert identity_of(event) == BlockIdentity(None, None, None)


@pytest.mark.parametrize("parent", [None, 7])
@pytest.mark.parametrize(
    ("event", "adapter"),
    [
        (stored(blocks=2, lora_name="sql"), "sql"),
        (stored(["sql"], ["sql"], lora_id=1, lora_name="sql"), "sql"),
        (stored(["sql"], lora_id=1, lora_name="sql"), "sql"),
        (stored(["sql"], ["sql"], lora_id=1), "sql"),
        (stored(["sql"], lora_id=1), "sql"),
        (stored(blocks=2, lora_id=1), "lora_id:1"),
        (stored(None, None, lora_id=0), "lora_id:0"),
    ],
)
def test_adapter_is_read_from_name_id_or_keys(event: BlockStored, parent: int | None, adapter: str) -> None:
    event.parent_block_hash = parent
    assert identity_of(event) == BlockIdentity(adapter, None, None)


def test_adapter_from_keys_must_be_in_each_block() -> None:
    assert identity_of(stored(["sql"], ["sql"])) == BlockIdentity("sql", None, None)
    assert identity_of(stored(["sql", "tenant"], ["sql"])) == BlockIdentity("sql", "tenant", None)


def test_key_after_a_parent_is_an_adapter_only_if_known() -> None:
    event = stored(["sql"], parent=7)
    assert identity_of(event, {"sql"}) == BlockIdentity("sql", None, None)
    assert identity_of(event) == BlockIdentity(None, None, [key("sql")])


def test_image_in_several_blocks_is_no_adapter() -> None:
    assert identity_of(stored(["image"], ["image"], parent=7)) == BlockIdentity(None, None, [key("image")] * 2)


@pytest.mark.parametrize(
    ("event", "adapter"),
    [
        (stored(["tenant"]), None),
        (stored(["tenant"], None, None), None),
        (stored(blocks=2, cache_salt="tenant"), None),
        (stored(["sql", "tenant"], ["sql"], lora_name="sql"), "sql"),
        (stored(["sql", "tenant"], lora_id=1), "sql"),
        (stored(blocks=1, cache_salt="tenant", lora_name="sql"), "sql"),
        (stored(blocks=1, cache_salt="tenant", lora_id=1), "lora_id:1"),
    ],
)
def test_salt_is_read_from_both_engines_with_and_without_adapter(event: BlockStored, adapter: str | None) -> None:
    assert identity_of(event) == BlockIdentity(adapter, "tenant", None)


def test_other_keys_stay_with_their_block() -> None:
    event = stored(["sql", IMAGE, "tenant"], ["sql", IMAGE], ["sql"], lora_name="sql")
    assert identity_of(event) == BlockIdentity("sql", "tenant", [key(IMAGE), key(IMAGE), None])


def test_null_keys_are_kept() -> None:
    assert identity_of(stored([None, 5], parent=7)) == BlockIdentity(None, None, [key(None, 5)])


def test_identity_does_not_change_the_event() -> None:
    event = stored(["sql", "tenant"], ["sql"], lora_name="sql")
    identity_of(event)
    assert event.extra_keys == [["sql", "tenant"], ["sql"]]


def test_keys_for_a_wrong_number_of_blocks_are_rejected() -> None:
    with pytest.raises(ValueError, match="2 entries for 3 blocks"):
        identity_of(stored(["a"], None, blocks=3))


def test_empty_keys_are_encoded_as_none() -> None:
    assert encode_keys([]) is None
    assert encode_keys(["a"]) == key("a")
