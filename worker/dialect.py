"""What an event looks like in each engine's dialect, and which events a dialect cannot tell.

An index that hears of a block without all that tells it apart would take it for another one. Such blocks are better not
spoken of.
"""

from __future__ import annotations

import msgspec

from kvevents import BlockStored, WireForm

_VLLM = frozenset({WireForm.VLLM_MAPS, WireForm.VLLM_ARRAYS})


def in_dialect(event: BlockStored, form: WireForm) -> BlockStored | None:
    """A stored event as an engine of that dialect would send it; None when the dialect has no words for it."""
    if form in _VLLM:
        return _with_salt_in_keys(event)
    if form is WireForm.SGLANG_MAPS:
        return event
    other_keys = event.extra_keys is not None and any(event.extra_keys)
    adapter_by_number = event.lora_id is not None and event.lora_name is None
    wrong_adapter = adapter_by_number if form is WireForm.STANDARD else event.lora_name is not None
    if other_keys or wrong_adapter or event.group_idx or event.kv_cache_spec_kind not in (None, "full_attention"):
        return None
    return event


def hash_types(form: WireForm) -> frozenset[type[int] | type[bytes]]:
    """What a block hash may be: SGLang's decoders take numbers only."""
    sglang = form in (WireForm.SGLANG_MAPS, WireForm.SGLANG_ARRAYS)
    return frozenset({int}) if sglang else frozenset({int, bytes})


def _with_salt_in_keys(event: BlockStored) -> BlockStored:
    """vLLM names the salt in the extra keys of a sequence's first block, after all others."""
    if event.cache_salt is None:
        return event
    keys = event.extra_keys
    if event.parent_block_hash is None and event.block_hashes:
        rest = list(keys) if keys else [None] * len(event.block_hashes)
        keys = [[*(rest[0] or []), event.cache_salt], *rest[1:]]
    return msgspec.structs.replace(event, cache_salt=None, extra_keys=keys)
