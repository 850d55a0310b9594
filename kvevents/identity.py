"""What tells apart two blocks with the same tokens: the adapter, the cache salt, and per-block keys such as images.

vLLM names the adapter in `lora_name` and again in every block's extra keys, and puts the salt into the extra keys of a
sequence's first block; SGLang sends the salt as `cache_salt`. Here both become one adapter, one salt and what is left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kvevents.events import BlockStored

_encode = msgspec.msgpack.Encoder().encode


class BlockIdentity(NamedTuple):
    """Adapter and salt of a sequence, and one encoded key a block where something else (an image, say) takes part.

    Adapter and salt are only known for events that start a sequence; later blocks inherit them from their parent.
    """

    adapter: str | None
    cache_salt: str | None
    keys: list[bytes | None] | None


def identity_of(event: BlockStored) -> BlockIdentity:
    """Read the identity of an event's blocks. Raises ValueError when `extra_keys` has not one entry a block."""
    extra = event.extra_keys
    adapter = event.lora_name
    if not extra or not any(extra):
        if adapter is None and event.lora_id is not None:
            adapter = f"lora_id:{event.lora_id}"
        return BlockIdentity(adapter, event.cache_salt, None)
    if len(extra) != len(event.block_hashes):
        raise ValueError(f"extra_keys has {len(extra)} entries for {len(event.block_hashes)} blocks")
    rest = [list(keys or ()) for keys in extra]
    if adapter is None:
        adapter = _adapter_in_keys(rest, event.lora_id)
    for keys in rest:
        if adapter in keys:
            keys.remove(adapter)
    salt = event.cache_salt
    if salt is None and event.parent_block_hash is None:
        salt = next((key for key in reversed(rest[0]) if isinstance(key, str)), None)
        if salt is not None:
            rest[0].remove(salt)
    return BlockIdentity(adapter, salt, [encode_keys(keys) for keys in rest] if any(rest) else None)


def encode_keys(keys: list[Any]) -> bytes | None:
    """The canonical bytes of a block's remaining keys; None when there are none."""
    return _encode(keys) if keys else None


def _adapter_in_keys(keys_by_block: list[list[Any]], lora_id: int | None) -> str | None:
    """The adapter's name when an engine gives it only among the extra keys.

    It stands first in every block's keys. A lone string in a single block is an adapter only if the engine also sent
    an adapter id: without one it is a salt.
    """
    first = [keys[0] if keys and isinstance(keys[0], str) else None for keys in keys_by_block]
    if first[0] is not None and first.count(first[0]) == len(first) and (lora_id is not None or len(first) > 1):
        return first[0]
    return None if lora_id is None else f"lora_id:{lora_id}"
