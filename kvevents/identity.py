"""Identity of blocks beyond their tokens: the adapter, the cache salt, and keys of single blocks, such as images.

vLLM names the adapter in `lora_name` and again in every block's extra keys. It puts the salt into the extra keys of a
sequence's first block. SGLang sends the salt as `cache_salt`. `identity_of` reads both forms.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import msgspec

from kvevents.events import BlockStored

_encode = msgspec.msgpack.Encoder().encode


class BlockIdentity(NamedTuple):
    """Adapter and salt of a sequence, and one encoded key per block if other keys, such as images, take part.

    Adapter and salt are only known for events that start a sequence; later blocks inherit them from their parent.
    """

    adapter: str | None
    cache_salt: str | None
    keys: list[bytes | None] | None


def identity_of(event: BlockStored, adapters: Collection[str] = ()) -> BlockIdentity:
    """Return the identity of an event's blocks. Raises ValueError if `extra_keys` does not have one entry per block.

    `adapters` are the known ones. An event with a parent may name its adapter only among the extra keys. There, its
    name could also be that of an image.
    """
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
        adapter = _adapter_in_keys(event, rest, adapters)
    if adapter is not None:
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
    """Return the canonical bytes of a block's remaining keys; None without keys."""
    return _encode(keys) if keys else None


def _adapter_in_keys(event: BlockStored, keys_by_block: list[list[Any]], adapters: Collection[str]) -> str | None:
    """Return the adapter's name if it is only among the extra keys, or a name made of its id; None without adapter.

    The name is the first key of every block. The first key may also be a salt, in a sequence that starts with a single
    block, or an image, in later blocks. Then only an adapter id or a known name shows that the key is an adapter.
    """
    first = [keys[0] if keys and isinstance(keys[0], str) else None for keys in keys_by_block]
    name = first[0]
    if name is not None and first.count(name) == len(first):
        starts = event.parent_block_hash is None
        if event.lora_id is not None or name in adapters or (starts and len(first) > 1):
            return name
    return None if event.lora_id is None else f"lora_id:{event.lora_id}"
