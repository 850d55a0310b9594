"""The requests of Dynamo's selection service (ai-dynamo-runtime 1.6.1), and the errors for wrong ones."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

from http_api.errors import RequestError
from kvevents.decoding import read_json
from router.reservations.reservations import EXPIRY

T = TypeVar("T")

DEFAULT: Final = "default"

_UInt = Annotated[int, msgspec.Meta(ge=0)]
_UInt32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Name = Annotated[str, msgspec.Meta(max_length=512)]


class WorkerFields(msgspec.Struct, kw_only=True):
    """The fields of a worker that a change may set."""

    endpoint: str | None = None
    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[_UInt32, str] = {}
    replay_endpoint: str | None = None
    block_size: _UInt32 | None = None
    data_parallel_start_rank: _UInt32 | None = None
    data_parallel_size: _UInt32 | None = None
    max_num_batched_tokens: _UInt | None = None
    total_kv_blocks: _UInt | None = None
    stable_routing_id: str | None = None
    is_eagle: bool | None = None
    taints: list[str] = []
    topology_domains: dict[str, str] = {}
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None


class WorkerBody(WorkerFields, kw_only=True):
    """A worker that a client registers."""

    worker_id: _UInt
    model_name: _Name = DEFAULT
    routing_group: _Name = DEFAULT


class PartitionBody(msgspec.Struct, kw_only=True):
    model_name: _Name = DEFAULT
    routing_group: _Name = DEFAULT


class PromptBody(PartitionBody, kw_only=True):
    """A prompt: its token ids, or the hashes of its blocks."""

    token_ids: list[_UInt32] | None = None
    block_hashes: list[int] | None = None
    sequence_hashes: list[int] | None = None
    isl_tokens: _UInt32 | None = None
    lora_name: _Name | None = None
    cache_salt: _Name | None = None
    block_mm_infos: list[Any] | None = None


class SessionBody(msgspec.Struct):
    session_id: _Name
    parent_session_id: _Name | None = None
    session_final: bool | None = None
    input_trigger: Literal["user_message", "tool_result", "other"] | None = None


class _Rank(msgspec.Struct):
    worker_id: _UInt
    dp_rank: _UInt32


class _Constraints(msgspec.Struct, frozen=True):
    required_taints: tuple[str, ...] = ()


class SelectBody(PromptBody, kw_only=True):
    """A request for a choice. `wait`: the seconds to wait for capacity; 0: a full fleet is refused at once."""

    selection_id: str | None = None
    expected_output_tokens: _UInt32 | None = None
    priority_jump: float | None = None
    strict_priority: _UInt32 | None = None
    session_id: _Name | None = None
    session_context: SessionBody | None = None
    pinned_worker: _Rank | None = None
    allowed_worker_ids: list[_UInt] | None = None
    routing_constraints: _Constraints = _Constraints()
    advisory: bool = False
    expiry: float = EXPIRY
    wait: float = 0.0


class ReservationBody(PromptBody, kw_only=True):
    """A request to reserve what `select` chose, or a given worker."""

    selection_id: str
    worker_id: _UInt | None = None
    dp_rank: _UInt32 | None = None
    expected_output_tokens: _UInt32 | None = None
    effective_prefill_tokens: _UInt32 | None = None
    expiry: float = EXPIRY


class OutputBlockBody(msgspec.Struct):
    """A report of one more block of an answer."""

    decay_fraction: float | None = None


def read_body(body: Any, kind: type[T]) -> T:
    """Decode the JSON of a body, or convert a decoded body. Raises RequestError (400, 422)."""
    try:
        return read_json(body, kind) if isinstance(body, bytes) else msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise unprocessable(f"Failed to deserialize the JSON body into the target type: {error}") from error
    except msgspec.DecodeError as error:
        raise bad_request(f"Failed to parse the request body as JSON: {error}") from error


def check_hashes(asked: PromptBody, by_hashes: bool) -> None:
    blocks, sequences = asked.block_hashes, asked.sequence_hashes
    if blocks is None and not by_hashes:
        raise bad_request("block_hashes is required without token_ids")
    if sequences is None:
        raise bad_request("sequence_hashes is required without token_ids")
    if asked.isl_tokens is None:
        raise bad_request("isl_tokens is required without token_ids")
    if blocks is not None and len(blocks) != len(sequences):
        raise bad_request(f"block_hashes length {len(blocks)} must match sequence_hashes length {len(sequences)}")


def bad_request(message: str) -> RequestError:
    return RequestError(message)


def unprocessable(message: str) -> RequestError:
    return RequestError(message, status=422)


def not_found(message: str) -> RequestError:
    return RequestError(message, status=404, type="not_found_error")


def unavailable(message: str) -> RequestError:
    return RequestError(message, status=503, type="service_unavailable", retry_after=1)
