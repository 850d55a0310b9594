"""Messages of Envoy's external processing protocol: what is read of them, and the answers to them."""

from __future__ import annotations

from collections.abc import Iterator

from router.http.headers import Headers
from router.picker import ext_proc_pb2 as pb

DESTINATION = "x-gateway-destination-endpoint"
_SUBSET = "x-gateway-destination-endpoint-subset"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
_LB_NAMESPACE = "envoy.lb"
_SERVED = "x-gateway-destination-endpoint-served"
_OWN_NAMESPACE = "kvrouter"
_REQUEST = "request"
_ATTRIBUTES = "envoy.filters.http.ext_proc"

# Envoy takes no more at once where it streams in both directions.
CHUNK_BYTES = 63 * 1024

_OVERWRITE = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD

# Answers that change nothing.
KEEP_REQUEST_HEAD = pb.ProcessingResponse(request_headers=pb.HeadersResponse()).SerializeToString()
KEEP_REQUEST_TRAILERS = pb.ProcessingResponse(request_trailers=pb.TrailersResponse()).SerializeToString()
KEEP_HEAD = pb.ProcessingResponse(response_headers=pb.HeadersResponse()).SerializeToString()
KEEP_BODY = pb.ProcessingResponse(response_body=pb.BodyResponse()).SerializeToString()
KEEP_TRAILERS = pb.ProcessingResponse(response_trailers=pb.TrailersResponse()).SerializeToString()


def read_headers(headers: pb.HeaderMap) -> tuple[dict[str, str], Headers]:
    """HTTP/2's pseudo-headers, such as `:path`, and the headers."""
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
    """The endpoints, as ip:port, that a request may go to; None: any.

    Envoy's metadata alone says so: a header of that name is the client's.
    """
    metadata = message.metadata_context.filter_metadata
    if _SUBSET_NAMESPACE in metadata and _SUBSET in (fields := metadata[_SUBSET_NAMESPACE].fields):
        value = fields[_SUBSET]
        if value.HasField("list_value"):
            return {each.string_value.strip() for each in value.list_value.values} - {""}
        return _listed(value.string_value)
    return None


def _listed(text: str) -> set[str]:
    return {each.strip() for each in text.split(",")} - {""}


def read_served(message: pb.ProcessingRequest) -> str | None:
    """The endpoint that answers, as ip:port; None where Envoy does not say."""
    metadata = message.metadata_context.filter_metadata
    if _LB_NAMESPACE in metadata and (served := metadata[_LB_NAMESPACE].fields[_SERVED].string_value):
        return served
    return _attribute(message, "upstream.address")


def read_problem(message: pb.ProcessingRequest) -> str | None:
    """Why Envoy answers in a worker's stead; None where the worker answers, or Envoy does not say."""
    details = _attribute(message, "response.code_details")
    return None if details == "via_upstream" else details


def _attribute(message: pb.ProcessingRequest, name: str) -> str | None:
    if _ATTRIBUTES not in message.attributes:
        return None
    fields = message.attributes[_ATTRIBUTES].fields
    return fields[name].string_value or None if name in fields else None


def read_observed(message: pb.ProcessingRequest) -> str | None:
    """The number of the request whose answer is shown, as `routed` gave it."""
    metadata = message.metadata_context.filter_metadata
    return metadata[_OWN_NAMESPACE].fields[_REQUEST].string_value or None if _OWN_NAMESPACE in metadata else None


def routed(endpoints: str, number: str, before: Headers, after: Headers, path: str | None) -> pb.ProcessingResponse:
    """Send a request to the first of these endpoints, with these headers instead of those it came with.

    `number`: what its answer is known by, where that is shown beside. `path`: another one, with its query.
    """
    common = pb.CommonResponse(clear_route_cache=True)
    mutation = common.header_mutation
    _set(mutation, DESTINATION, endpoints.encode())
    if path is not None:
        _set(mutation, ":path", path.encode("latin-1"))
    _set_new(mutation, before, after)
    left = {name for name, _ in after}
    mutation.remove_headers.extend({name.decode("latin-1") for name, _ in before if name not in left})
    response = pb.ProcessingResponse(request_headers=pb.HeadersResponse(response=common))
    metadata = response.dynamic_metadata
    metadata.fields[_LB_NAMESPACE].struct_value.fields[DESTINATION].string_value = endpoints
    metadata.fields[_OWN_NAMESPACE].struct_value.fields[_REQUEST].string_value = number
    return response


def as_answer_to_body(response: pb.ProcessingResponse, body: bytes | None) -> pb.ProcessingResponse:
    """The same, for an Envoy that sent the whole body before it goes on. `body`: what to send instead of it."""
    moved = pb.ProcessingResponse(dynamic_metadata=response.dynamic_metadata)
    moved.request_body.response.CopyFrom(response.request_headers.response)
    if body is not None:
        moved.request_body.response.body_mutation.body = body
    return moved


def request_chunks(body: bytes, ends: bool) -> Iterator[bytes]:
    """A request's body to pass on. `ends`: no trailers follow."""
    for part in _parts(body, ends):
        yield pb.ProcessingResponse(request_body=part).SerializeToString()


def answer_chunks(body: bytes, ends: bool) -> Iterator[bytes]:
    """Bytes of an answer's body to pass on."""
    for part in _parts(body, ends):
        yield pb.ProcessingResponse(response_body=part).SerializeToString()


def _parts(body: bytes, ends: bool) -> Iterator[pb.BodyResponse]:
    for start in range(0, max(len(body), 1), CHUNK_BYTES):
        last = start + CHUNK_BYTES >= len(body)
        part = pb.StreamedBodyResponse(body=body[start : start + CHUNK_BYTES], end_of_stream=ends and last)
        yield pb.BodyResponse(response=pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=part)))


def answer_head(before: Headers, after: Headers, mode: pb.ProcessingMode | None = None) -> bytes:
    """An answer's head with the headers that were added. `mode`: what Envoy is to send of the rest."""
    response = pb.ProcessingResponse(response_headers=pb.HeadersResponse())
    _set_new(response.response_headers.response.header_mutation, before, after)
    if mode is not None:
        response.mode_override.CopyFrom(mode)
    return response.SerializeToString()


def immediate(status: int, headers: Headers, body: bytes, details: str) -> bytes:
    """Answer a request at once."""
    response = pb.ProcessingResponse()
    answer = response.immediate_response
    answer.status.code = status
    answer.body = body
    answer.details = details
    for name, value in headers:
        if name != b"content-length":
            _set(answer.headers, name.decode("latin-1"), value)
    return response.SerializeToString()


def _set_new(mutation: pb.HeaderMutation, before: Headers, after: Headers) -> None:
    known = set(before)
    for header in after:
        if header not in known:
            _set(mutation, header[0].decode("latin-1"), header[1])


def _set(mutation: pb.HeaderMutation, name: str, value: bytes) -> None:
    option = mutation.set_headers.add(append_action=_OVERWRITE)
    option.header.key = name
    option.header.raw_value = value
