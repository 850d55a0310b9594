"""Headers between a gateway and the picker: they are read, and not forwarded.

- `x-gateway-inference-objective`: the name of an InferenceObjective, whose priority the request gets.
- `x-gateway-model-name-rewrite`: the model to use instead of the body's.
- `x-gateway-inference-fairness-id`: the tenant. It is ignored, because kvrouter identifies tenants by their keys.
- `x-gateway-destination-endpoint`, `-served` and `-subset`: endpoints. Only the picker and Envoy's metadata set them.
- `x-prefiller-host-port`, `x-encoder-hosts-ports` and `x-data-parallel-host-port`: next workers, for llm-d's sidecar.

A client that could name endpoints would reach every address that the gateway can reach. So none of these headers is
forwarded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from http_api.errors import RequestError
from router.admission.ticket import PRIORITY_HEADER
from router.apis.json_edit import SpliceError, with_field
from router.http.headers import Headers
from router.picker.state import Objectives

_OBJECTIVE: Final = b"x-gateway-inference-objective"
_REWRITE: Final = b"x-gateway-model-name-rewrite"
_OWN: Final = frozenset(
    {
        _OBJECTIVE,
        _REWRITE,
        b"x-gateway-inference-fairness-id",
        b"x-gateway-destination-endpoint",
        b"x-gateway-destination-endpoint-served",
        b"x-gateway-destination-endpoint-subset",
        b"x-prefiller-host-port",
        b"x-encoder-hosts-ports",
        b"x-data-parallel-host-port",
    }
)


@dataclass(frozen=True, slots=True)
class GatewayHeaders:
    """The meaning of a request's gateway headers.

    - `headers`: the other headers, with the priority of the objective.
    - `model`: the model to use; None means the body's.
    """

    headers: Headers
    model: bytes | None = None


def read(headers: Headers, objectives: Objectives) -> GatewayHeaders:
    """Read the gateway headers of a request, and remove them."""
    own = {name: value for name, value in headers if name in _OWN}
    if not own:  # nearly all requests
        return GatewayHeaders(headers)
    others = [header for header in headers if header[0] not in _OWN]
    priority = objectives.priority(own[_OBJECTIVE].decode("latin-1")) if _OBJECTIVE in own else None
    if priority is not None:  # a larger number is more urgent for an objective, less urgent for a request
        others = [header for header in others if header[0] != PRIORITY_HEADER]
        others.append((PRIORITY_HEADER, b"%d" % -priority))
    return GatewayHeaders(others, own.get(_REWRITE) or None)


def with_model(body: bytes, model: bytes) -> bytes:
    """Return a request's body with another model. Raises RequestError (400) if it is not a JSON object."""
    try:
        return with_field(body, "model", msgspec.json.encode(model.decode("latin-1")))
    except SpliceError as error:
        raise RequestError(f"The body is no JSON object: {error}") from error
