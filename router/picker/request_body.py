"""The body of a request, which Envoy sends in messages."""

from __future__ import annotations

from http_api.errors import RequestError
from router.auth import Admitted, too_large
from router.forwarding.proxy_services import ProxyContext
from router.http.arriving import ArrivingBytes
from router.http.headers import Headers, length_of
from router.picker import ext_proc_pb2 as pb
from router.settings import EngineFields

_Mode = pb.ProcessingMode


def check_expected(mode: int, headers: Headers, proxy_context: ProxyContext, admitted: Admitted) -> None:
    """Raise RequestError for a body that is too large, or that is needed and that Envoy does not send."""
    settings = proxy_context.settings
    length = next((value for name, value in headers if name == b"content-length"), b"")
    if length_of(length) > settings.max_body_bytes:
        raise too_large(settings)
    if mode in (_Mode.FULL_DUPLEX_STREAMED, _Mode.BUFFERED):
        return
    name = _Mode.BodySendMode.Name(mode) if mode in _Mode.BodySendMode.values() else str(mode)
    services = proxy_context.services
    if mode != _Mode.NONE:
        problem = ""
    elif services.reader.state.needs_prompts:
        problem = "The policy reads prompts. "
    elif services.fleet.disaggregated:
        problem = "Prefill and decode have different workers. "
    elif admitted.tenant is not None:
        problem = "The settings have tenants. "
    elif len(services.fleet.names()) > 1:
        problem = "The workers serve several models. "
    elif admitted.engine_fields is not EngineFields.PASS:
        problem = "Engine control fields are not checked, which only proxy.engine_fields: pass allows. "
    else:
        return
    raise RequestError(
        f"Envoy's request_body_mode is {name}. {problem}Set it to FULL_DUPLEX_STREAMED or BUFFERED.",
        status=500,
        type="internal_error",
    )


class RequestBody:
    """The received parts of a body. `trailers`: trailers follow it. `arrivals` counts the bytes of arriving bodies."""

    __slots__ = ("_arrivals", "_arriving", "_parts", "size", "trailers")

    def __init__(self, arrivals: ArrivingBytes) -> None:
        self.size = 0
        self.trailers = False
        self._parts: list[bytes] = []
        self._arrivals = arrivals
        self._arriving = 0

    def add(self, part: bytes) -> None:
        """Add a part. Raises RequestError (503) if too many bytes arrive at once."""
        self._arrivals.add(self._arriving, len(part))
        self._arriving += len(part)
        self._parts.append(part)
        self.size += len(part)

    def end_arrival(self) -> None:
        """Stop counting the body among those that are arriving."""
        self._arrivals.end(self._arriving)
        self._arriving = 0

    def whole(self) -> bytes:
        """Return the whole body. Repeated calls return one object."""
        if len(self._parts) != 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def drop(self) -> None:
        """Release the body after it is sent."""
        self._parts = []
