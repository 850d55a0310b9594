"""The method that Envoy calls: `envoy.service.ext_proc.v3.ExternalProcessor/Process`, once a request and filter."""

from __future__ import annotations

from typing import Final

from google.protobuf.message import DecodeError

from router.picker import ext_proc_pb2 as pb
from router.picker.grpc_calls import INTERNAL, Call, CallHandler, Methods
from router.picker.observer import observe
from router.picker.request import PickedRequest
from router.picker.state import PickerState

SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"

_read: Final = pb.ProcessingRequest.FromString


class ExternalProcessor:
    """Handles the calls of Envoys."""

    def __init__(self, state: PickerState) -> None:
        self._state = state

    @property
    def methods(self) -> Methods:
        """Process."""
        return {f"/{SERVICE}/Process": self._process}

    def _process(self, call: Call) -> CallHandler:
        return _Process(self._state, call)


class _Process:
    """One call. The first message says whether a request is asked about, or an answer only shown."""

    __slots__ = ("_call", "_request", "_state")

    def __init__(self, state: PickerState, call: Call) -> None:
        self._state = state
        self._call = call
        self._request: PickedRequest | None = None

    def received(self, message: bytes) -> None:
        """A message of Envoy's."""
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
        """Envoy is done with the request."""
        self._call.end()

    def closed(self) -> None:
        """So is the call."""
        request, self._request = self._request, None
        if request is not None:
            request.closed()
