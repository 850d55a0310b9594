"""JSON bodies of the index API's routes."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from http_api.errors import RequestError
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


class _QueryFields(msgspec.Struct, kw_only=True):
    """Fields of a query that have the names of RFC 1403 or of Dynamo's indexer. `instance_id` selects one instance."""

    model: str | None = None
    model_name: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    additional_salt: str | None = None
    tenant_id: str = DEFAULT_TENANT
    instance_id: str | int | None = None


class QueryBody(_QueryFields, kw_only=True):
    """`POST /query`: a token sequence."""

    token_ids: list[int]


class PackedQuery(_QueryFields, kw_only=True):
    """A `QueryBody` from which the token ids were cut out, so that `token_ids` is empty."""

    token_ids: list[None]


class HashQueryBody(_QueryFields, kw_only=True):
    """`POST /query_by_hash`: the prefix hashes of consecutive blocks from the start of a prompt."""

    block_hashes: list[int] | None = None
    seq_hashes: list[int] | None = None
    block_hash: list[int] | None = None
    block_size: int | None = None


class RegisterBody(msgspec.Struct, forbid_unknown_fields=False):
    """`POST /register`: the event stream of one DP rank, in the names of RFC 1403 or of Dynamo's indexer."""

    endpoint: str
    instance_id: str | int
    modelname: str | None = None
    model_name: str | None = None
    type: Literal["vLLM", "SGLang", "Mooncake"] = "vLLM"
    replay_endpoint: str | None = None
    block_size: int | None = None
    dp_rank: int | None = None
    topic: str = ""
    lora_name: str | None = None
    tenant_id: str = DEFAULT_TENANT
    curve_server_key: str | None = None
    additionalsalt: str | None = None
    additional_salt: str | None = None


class UnregisterBody(msgspec.Struct):
    """`POST /unregister`: an instance, or the part of it that `modelname` and `dp_rank` select.

    Without `tenant_id`, `model_name` (Dynamo's field) selects the instance in every tenant.
    """

    instance_id: str | int
    modelname: str | None = None
    model_name: str | None = None
    dp_rank: int | None = None
    tenant_id: str | None = None


def one_of(body: msgspec.Struct, *names: str) -> Any:
    """Return the first field of `names` that a body has. Raises RequestError if it has none."""
    given = next((value for name in names if (value := getattr(body, name)) is not None), None)
    if given is None:
        raise RequestError(f"{names[0]} is missing. Send {' or '.join(names)}.", param=names[0])
    return given
