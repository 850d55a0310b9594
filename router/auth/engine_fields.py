"""Engine control fields and headers, which only the router may send: addresses, ranks, request ids, code, token ids.

The setting `proxy.engine_fields` says whether a client's own are refused, stripped or passed. The names are those of
vLLM 0.32, SGLang 0.5, TensorRT-LLM 1.0, Dynamo and llm-d's sidecar. Token ids beside a prompt are control fields,
because the engine computes them instead of the prompt that is routed, moderated and logged.
"""

from __future__ import annotations

from typing import Any, Final

from http_api.errors import RequestError
from router.http.headers import Headers

CONTROL_FIELDS: Final = frozenset(
    {
        "kv_transfer_params",
        "ec_transfer_params",
        "disaggregated_params",
        "disagg_request_id",
        "disagg_prefill_dp_rank",
        "disagg_prefill_addr",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "bootstrap_pair_key",
        "data_parallel_rank",
        "data_parallel_rank_decode",
        "routed_dp_rank",
        "dp_rank",
        "prefill_dp_rank",
        "backend_instance_id",
        "prefill_worker_id",
        "decode_worker_id",
        "routed_experts_start_len",
        "rid",
        "request_id",
        "mm_hashes",
        "custom_logit_processor",
        "prompt_token_ids",
        "token_data",
        "input_ids",
    }
)
# SGLang's own API, where `input_ids` is the prompt.
PROMPT_IDS_PATHS: Final = frozenset({"/generate", "/encode"})
_WITHOUT_PROMPT_IDS: Final = CONTROL_FIELDS - {"input_ids"}
# Objects whose fields engines read as settings of the request. Control fields are searched in them, too.
CARRIERS: Final = ("vllm_xargs", "extra_args", "extra_body", "sampling_params", "custom_params", "nvext")

CONTROL_HEADERS: Final = frozenset(
    {
        b"x-data-parallel-rank",
        b"x-data-parallel-host-port",
        b"x-prefiller-host-port",
        b"x-prefiller-url",
        b"x-decoder-host-port",
        b"x-encoder-hosts-ports",
        b"x-kv-cache-source-host-port",
        b"x-routed-dp-rank",
        b"x-sglang-dp-rank",
        b"x-dp-rank",
        b"x-prefill-dp-rank",
        b"x-worker-instance-id",
        b"x-prefill-instance-id",
        b"x-dynamo-dp-rank",
        b"x-dynamo-prefill-dp-rank",
        b"x-dynamo-worker-instance-id",
        b"x-dynamo-prefill-instance-id",
        b"x-smg-target-worker",
        b"x-gateway-destination-endpoint",
        b"x-gateway-destination-endpoint-subset",
        b"x-override-rid",
        b"x-override-bootstrap-host",
        b"x-override-bootstrap-port",
        b"x-override-bootstrap-room",
        b"x-override-conversation-id",
        b"x-override-routed-dp-rank",
        b"x-override-disagg-prefill-dp-rank",
        b"x-override-priority",
    }
)


def control_header(headers: Headers) -> bytes | None:
    """Return the first engine control header, if any. Names are in lower case, and `_` equals `-`."""
    for name, _ in headers:
        if name in CONTROL_HEADERS or (b"_" in name and name.replace(b"_", b"-") in CONTROL_HEADERS):
            return name
    return None


def without_control_headers(headers: Headers) -> Headers:
    """Return the headers without engine control headers."""
    return [header for header in headers if header[0].replace(b"_", b"-") not in CONTROL_HEADERS]


def control_names(path: str) -> frozenset[str]:
    """Return the names of the top-level engine control fields in bodies for this path."""
    return _WITHOUT_PROMPT_IDS if path in PROMPT_IDS_PATHS else CONTROL_FIELDS


def control_fields(
    fields: dict[str, Any], names: frozenset[str] = CONTROL_FIELDS, inside: frozenset[str] = CONTROL_FIELDS
) -> list[str]:
    """Return the paths of an object's engine control fields, such as `rid` or `vllm_xargs.kv_transfer_params`.

    `names`, `inside`: the names at the top level, and those inside carriers.
    """
    found = [] if names.isdisjoint(fields) else [name for name in fields if name in names]
    for name in CARRIERS:
        if name in fields:
            found += [f"{name}.{inner}" for inner in _control_fields_inside(fields[name], inside)]
    return found


def _control_fields_inside(value: Any, inside: frozenset[str]) -> list[str]:
    if isinstance(value, list):
        return [name for each in value for name in _control_fields_inside(each, inside)]
    return control_fields(value, inside, inside) if isinstance(value, dict) else []


def without_control_fields(value: Any) -> Any:
    """Return a carrier's value without engine control fields."""
    if isinstance(value, list):
        return [without_control_fields(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        name: without_control_fields(inner) if name in CARRIERS else inner
        for name, inner in value.items()
        if name not in CONTROL_FIELDS
    }


def refusal(name: str) -> RequestError:
    """Return the error for a request with this engine control field or header."""
    return RequestError(
        f"{name} controls an engine, and only the router may send it. Omit it, or set proxy.engine_fields.",
        param=name,
        code="engine_field",
    )
