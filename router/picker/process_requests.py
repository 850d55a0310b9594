"""Reading of requests: Envoy's `ProcessingRequest`s, and the headers between a gateway and the picker.

Gateway headers are read, and not forwarded:

- `x-gateway-inference-objective`: the name of an InferenceObjective, whose priority the request gets.
- `x-gateway-model-name-rewrite`: the model to use instead of the body's.
- `x-llm-d-inference-fairness-id`: the flow, which shares the queue with others. Tenants share it by their keys.
- `x-gateway-destination-endpoint`, `-served` and `-subset`: endpoints. Only the picker and Envoy's metadata set them.
- `x-prefiller-host-port`, `x-encoder-hosts-ports` and `x-data-parallel-host-port`: next workers, for llm-d's sidecar.

A client that could name endpoints would reach every address that the gateway can reach.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from http_api.errors import RequestError
from kvevents.decoding import read_json
from router.admission.ticket import PRIORITY_HEADER, Flow
from router.apis.body_fields import SessionFields
from router.apis.identities import find_identity
from router.apis.json_edit import SpliceError, field, with_field
from router.forwarding.request_context import RequestContext
from router.http.headers import Headers
from router.picker import ext_proc_pb2 as pb
from router.picker.model_rewrites import ModelRewrites
from router.picker.state import Objectives

_SUBSET = "x-gateway-destination-endpoint-subset"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_LB_NAMESPACE = "envoy.lb"
_SERVED = "x-gateway-destination-endpoint-served"
_OWN_NAMESPACE = "kvrouter"
_REQUEST = "request"
_WORKER = "x-kvrouter-worker"
_ATTRIBUTES = "envoy.filters.http.ext_proc"
# The names of llm-d, each before the older one of the Inference Extension.
_OBJECTIVE: Final = (b"x-llm-d-inference-objective", b"x-gateway-inference-objective")
_REWRITE: Final = (b"x-llm-d-model-name-rewrite", b"x-gateway-model-name-rewrite")
_FAIRNESS: Final = (b"x-llm-d-inference-fairness-id", b"x-gateway-inference-fairness-id")
_LONGEST_FLOW: Final = 256
_OWN: Final = frozenset(
    {
        *_OBJECTIVE,
        *_REWRITE,
        *_FAIRNESS,
        b"x-gateway-destination-endpoint",
        b"x-gateway-destination-endpoint-served",
        b"x-gateway-destination-endpoint-subset",
        b"x-prefiller-host-port",
        b"x-encoder-hosts-ports",
        b"x-data-parallel-host-port",
        b"x-kv-cache-source-host-port",
    }
)


def read_headers(headers: pb.HeaderMap) -> tuple[dict[str, str], Headers]:
    """Return HTTP/2's pseudo-headers, such as `:path`, and the headers."""
    pseudo: dict[str, str] = {}
    found: Headers = []
    for header in headers.headers:
        name, value = header.key, header.raw_value or header.value.encode()
        if name.startswith(":"):
            pseudo[name] = value.decode("latin-1")
        else:
            found.append((name.encode(), value))
    return pseudo, found


def read_subset(message: pb.ProcessingRequest) -> set[str] | None:
    """Return the endpoints `ip:port` that may receive a request; None: any. Headers of clients cannot name them."""
    metadata = message.metadata_context.filter_metadata
    if _SUBSET_NAMESPACE in metadata and _SUBSET in (fields := metadata[_SUBSET_NAMESPACE].fields):
        value = fields[_SUBSET]
        if value.HasField("list_value"):
            return {each.string_value.strip() for each in value.list_value.values} - {""}
        return {each.strip() for each in value.string_value.split(",")} - {""}
    return None


def read_served(message: pb.ProcessingRequest) -> str | None:
    """Return the endpoint `ip:port` that responds; None if Envoy does not report it."""
    metadata = message.metadata_context.filter_metadata
    if _LB_NAMESPACE in metadata and (served := metadata[_LB_NAMESPACE].fields[_SERVED].string_value):
        return served
    return _attribute(message, "upstream.address")


def read_problem(message: pb.ProcessingRequest) -> str | None:
    """Return why Envoy responds in place of a worker; None if the worker responds, or Envoy does not report it."""
    details = _attribute(message, "response.code_details")
    return None if details == "via_upstream" else details


def _attribute(message: pb.ProcessingRequest, name: str) -> str | None:
    if _ATTRIBUTES not in message.attributes:
        return None
    fields = message.attributes[_ATTRIBUTES].fields
    return fields[name].string_value or None if name in fields else None


def read_observed(message: pb.ProcessingRequest) -> str | None:
    """Return the number of the request whose response Envoy shows. `Routed` sent Envoy this number."""
    return _own(message, _REQUEST)


def read_worker(message: pb.ProcessingRequest) -> str | None:
    """Return the name of the worker in a response's headers."""
    return _own(message, _WORKER)


def _own(message: pb.ProcessingRequest, name: str) -> str | None:
    metadata = message.metadata_context.filter_metadata
    return metadata[_OWN_NAMESPACE].fields[name].string_value or None if _OWN_NAMESPACE in metadata else None


@dataclass(frozen=True, slots=True)
class GatewayHeaders:
    """The meaning of a request's gateway headers.

    - `headers`: the other headers, with the priority of the objective.
    - `model`: the model to use; None means the body's.
    - `flow`: its fairness id, and whether its objective is sheddable: its priority is below 0.
    """

    headers: Headers
    model: bytes | None = None
    flow: Flow | None = None


def read_gateway_headers(headers: Headers, objectives: Objectives) -> GatewayHeaders:
    """Read the gateway headers of a request, and remove them."""
    own = {name: value for name, value in headers if name in _OWN}
    if not own:  # nearly all requests
        return GatewayHeaders(headers)
    others = [header for header in headers if header[0] not in _OWN]
    objective = _first(own, _OBJECTIVE)
    priority = None if objective is None else objectives.priority(objective.decode("latin-1"))
    if priority is not None:  # a larger number is more urgent for an objective, less urgent for a request
        others = [header for header in others if header[0] != PRIORITY_HEADER]
        others.append((PRIORITY_HEADER, b"%d" % -priority))
    name = (_first(own, _FAIRNESS) or b"").decode("latin-1")[:_LONGEST_FLOW]
    flow = Flow(name, priority is not None and priority < 0)
    return GatewayHeaders(others, _first(own, _REWRITE), flow)


def _first(own: dict[bytes, bytes], names: tuple[bytes, ...]) -> bytes | None:
    """Return the value of the first of these headers that is not empty."""
    for name in names:
        if value := own.get(name):
            return value
    return None


def model_by_rules(rewrites: ModelRewrites, context: RequestContext, body: bytes) -> bytes | None:
    """Return the model by the rules of the cluster; None if none applies, or if the body is not a JSON object."""
    try:
        model = read_json(field(body, "model") or b"", str)
    except (SpliceError, msgspec.DecodeError):
        return None
    caller = find_identity(context.identity_headers, SessionFields())
    target = rewrites.target(model, None if caller is None else caller.session)
    return None if target is None else target.encode()


def with_model(body: bytes, model: bytes) -> bytes:
    """Return a request's body with another model. Raises RequestError (400) if it is not a JSON object."""
    try:
        return with_field(body, "model", msgspec.json.encode(model.decode(errors="replace")))
    except SpliceError as error:
        raise RequestError(f"The body is no JSON object: {error}") from error
