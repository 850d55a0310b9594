"""JSON bodies of the index API's routes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from indexer.index import DEFAULT_TENANT


class MatchBody(msgspec.Struct):
    """`POST /match`: a prompt as `messages`, `prompt` or `token_ids`. Fields that change its rendering are allowed."""

    model: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    token_ids: list[int] | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str | None = None


class QueryBody(msgspec.Struct):
    """`POST /query`: a token sequence."""

    model: str
    token_ids: list[int]
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str = DEFAULT_TENANT


class PackedQuery(msgspec.Struct):
    """A `QueryBody` from which the token ids were cut out, so that `token_ids` is empty."""

    model: str
    token_ids: list[None]
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str = DEFAULT_TENANT


class HashQueryBody(msgspec.Struct):
    """`POST /query_by_hash`: the prefix hashes of consecutive blocks from the start of a prompt."""

    model: str
    block_hashes: list[int]
    block_size: int | None = None
    tenant_id: str = DEFAULT_TENANT


class RegisterBody(msgspec.Struct, forbid_unknown_fields=False):
    """`POST /register`: the event stream of one DP rank."""

    endpoint: str
    modelname: str
    instance_id: str
    type: Literal["vLLM", "SGLang"] = "vLLM"
    replay_endpoint: str | None = None
    block_size: int | None = None
    dp_rank: int = 0
    topic: str = ""
    lora_name: str | None = None
    tenant_id: str = DEFAULT_TENANT
    curve_server_key: str | None = None


class UnregisterBody(msgspec.Struct):
    """`POST /unregister`: an instance, or the part of it that `modelname` and `dp_rank` select."""

    instance_id: str
    modelname: str | None = None
    dp_rank: int | None = None
    tenant_id: str = DEFAULT_TENANT
