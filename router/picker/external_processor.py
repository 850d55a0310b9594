"""The gRPC method that Envoy calls: `envoy.service.ext_proc.v3.ExternalProcessor/Process`, once per request and filter.

By it, Envoy asks for the endpoint of a request, or shows the bytes of a response (observability mode).
"""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from router.picker import ext_proc_pb2 as pb
from router.picker.grpc_server import INTERNAL, Call, CallHandler, Methods
from router.picker.process_requests import read_observed, read_problem, read_worker
from router.picker.request import PickedRequest
from router.picker.state import PickerState


def observe(message: pb.ProcessingRequest, state: PickerState) -> bool:
    """Read a shown message. Return whether more are wanted."""
    kind = message.WhichOneof("request")
    if kind == "response_headers":
        _look_for_failure(message, state)
    if kind != "response_body":
        return True
    number = read_observed(message)
    if number is None:
        return False  # the picker answered it itself
    state.observed = True
    request = state.requests.get(number)
    part = message.response_body
    return request is not None and request.observed(part.body, part.end_of_stream)


def _look_for_failure(message: pb.ProcessingRequest, state: PickerState) -> None:
    """Report a worker that Envoy could not reach: it gets no requests until a probe succeeds."""
    name, problem = read_worker(message), read_problem(message)
    worker = state.fleet.find(name) if name is not None and problem is not None else None
    if worker is not None and problem is not None:
        state.fleet.report_failure(worker, problem)


SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"

_read: Final = pb.ProcessingRequest.FromString


class ExternalProcessor:
    """Handles the calls of Envoy."""

    def __init__(self, state: PickerState) -> None:
        self._state = state

    @property
    def methods(self) -> Methods:
        """The method Process."""
        return {f"/{SERVICE}/Process": self._process}

    def _process(self, call: Call) -> CallHandler:
        return _Process(self._state, call)


class _Process:
    """One call. Its first message decides: Envoy asks about a request, or shows a response."""

    __slots__ = ("_call", "_request", "_state")

    def __init__(self, state: PickerState, call: Call) -> None:
        self._state = state
        self._call = call
        self._request: PickedRequest | None = None

    def received(self, message: bytes) -> None:
        """Receive a message of Envoy."""
        try:
            read = _read(message)
        except DecodeError:
            self._call.end(INTERNAL, "no ProcessingRequest")
            return
        if self._request is not None:
            self._request.received(read)
        elif not read.observability_mode:
            self._request = PickedRequest(self._state, self._call)
            self._request.received(read)
        elif not observe(read, self._state):
            self._call.end()  # no more is wanted

    def peer_ended(self) -> None:
        """End the call: Envoy has no more messages."""
        self._call.end()

    def closed(self) -> None:
        """Release the request."""
        request, self._request = self._request, None
        if request is not None:
            request.closed()
