"""What steers an engine: where it fetches KV blocks from, which rank computes, what a request is known by, which code
runs. These are the router's to say. A client's own are refused, stripped or passed, as `proxy.engine_fields` says.

Names are those of vLLM 0.32, SGLang 0.5, TensorRT-LLM 1.0 and llm-d's sidecar.
"""

from __future__ import annotations

from typing import Any, Final

from http_api.errors import RequestError
from router.http.headers import Headers

FIELDS: Final = frozenset(
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
        "routed_experts_start_len",
        "rid",
        "request_id",
        "custom_logit_processor",
    }
)
# Objects whose fields engines take as their own settings of a request: the same names count in them.
CARRIERS: Final = ("vllm_xargs", "extra_args", "extra_body", "sampling_params", "custom_params", "nvext")

HEADERS: Final = frozenset(
    {
        b"x-data-parallel-rank",
        b"x-data-parallel-host-port",
        b"x-prefiller-host-port",
        b"x-prefiller-url",
        b"x-decoder-host-port",
        b"x-encoder-hosts-ports",
        b"x-routed-dp-rank",
        b"x-sglang-dp-rank",
        b"x-dp-rank",
        b"x-worker-instance-id",
        b"x-prefill-instance-id",
        b"x-smg-target-worker",
        b"x-gateway-destination-endpoint",
        b"x-gateway-destination-endpoint-subset",
    }
)


def steering_header(headers: Headers) -> bytes | None:
    """The first header that steers an engine; None without one. Names are in lower case, `_` counts as `-`."""
    for name, _ in headers:
        if name in HEADERS or (b"_" in name and name.replace(b"_", b"-") in HEADERS):
            return name
    return None


def without_steering(headers: Headers) -> Headers:
    """The headers but for those."""
    return [header for header in headers if header[0].replace(b"_", b"-") not in HEADERS]


def steering_fields(fields: dict[str, Any]) -> list[str]:
    """The fields of a JSON object that steer an engine, as paths: `rid`, or `vllm_xargs.kv_transfer_params`."""
    found = [] if FIELDS.isdisjoint(fields) else [name for name in fields if name in FIELDS]
    for name in CARRIERS:
        if name in fields:
            found += [f"{name}.{inner}" for inner in _inside(fields[name])]
    return found


def _inside(value: Any) -> list[str]:
    if isinstance(value, list):
        return [name for each in value for name in _inside(each)]
    return steering_fields(value) if isinstance(value, dict) else []


def stripped(fields: dict[str, Any]) -> dict[str, Any]:
    """The object without them."""
    return {
        name: _stripped_inside(value) if name in CARRIERS else value
        for name, value in fields.items()
        if name not in FIELDS
    }


def _stripped_inside(value: Any) -> Any:
    if isinstance(value, list):
        return [_stripped_inside(each) for each in value]
    return stripped(value) if isinstance(value, dict) else value


def refusal(name: str) -> RequestError:
    """What a request with such a field or header is refused with."""
    return RequestError(
        f"{name} is the router's to say to an engine. Leave it out, or set proxy.engine_fields.",
        param=name,
        code="engine_field",
    )
