"""The bodies of questions, and how any JSON body of the index API is read."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from http_api.errors import RequestError
from indexer.queries import DEFAULT_TENANT

T = TypeVar("T")


class MatchBody(msgspec.Struct):
    """`POST /match`: a prompt in one of three forms; whatever changes how it is rendered may stand beside it."""

    model: str
    messages: list[dict[str, Any]] | None = None
    prompt: str | list[int] | None = None
    token_ids: list[int] | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str | None = None


class HashQueryBody(msgspec.Struct):
    """`POST /query_by_hash`: the prefix hashes of consecutive blocks, from the start of a prompt."""

    model: str
    block_hashes: list[int]
    block_size: int | None = None
    tenant_id: str = DEFAULT_TENANT


class PackedQuery(msgspec.Struct):
    """A `QueryBody` whose token ids were taken out, which leaves an empty list."""

    model: str
    token_ids: list[None]
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str = DEFAULT_TENANT


class QueryBody(msgspec.Struct):
    """`POST /query`: a token sequence."""

    model: str
    token_ids: list[int]
    lora_name: str | None = None
    cache_salt: str | None = None
    tenant_id: str = DEFAULT_TENANT


def decoded(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body. Raises RequestError with the path to what does not fit."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{error}. Send a JSON object as the API describes.", param=_field(str(error))) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}. Send one JSON object.") from error


def _field(message: str) -> str | None:
    """The field that a msgspec message is about: the path it ends with, or the field it says is missing."""
    _, quote, path = message.rpartition("`$.")
    if quote:
        return path.removesuffix("`").partition(".")[0].partition("[")[0]
    missing = message.partition("required field `")[2].partition("`")[0]
    return missing or None
