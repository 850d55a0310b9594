"""Reads Envoy's messages: `ProcessingRequest`s of external processing."""

from __future__ import annotations

from router.http.headers import Headers
from router.picker import ext_proc_pb2 as pb

_SUBSET = "x-gateway-destination-endpoint-subset"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_LB_NAMESPACE = "envoy.lb"
_SERVED = "x-gateway-destination-endpoint-served"
_OWN_NAMESPACE = "kvrouter"
_REQUEST = "request"
_WORKER = "x-kvrouter-worker"
_ATTRIBUTES = "envoy.filters.http.ext_proc"


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
