"""A client that speaks Envoy's side of external processing, one message at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_call import GrpcCall

from router.picker import ext_proc_pb2 as pb

Mode = pb.ProcessingMode
METHOD = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION = "x-gateway-destination-endpoint"
SUBSET = "x-gateway-destination-endpoint-subset"


class EnvoyStream:
    """The stream of one request."""

    def __init__(
        self,
        channel: grpc.Channel,
        request: int = Mode.FULL_DUPLEX_STREAMED,
        answer: int = Mode.NONE,
        subset: Any = None,
    ) -> None:
        """Open a stream. `request` and `answer` are body modes, `subset` is the gateway's metadata."""
        self.call = GrpcCall(channel, METHOD)
        self.sends_modes = True
        self._config: Any = pb.ProtocolConfiguration(request_body_mode=request, response_body_mode=answer)
        self._subset = subset

    async def send(self, **message: Any) -> None:
        """Send a message."""
        request = pb.ProcessingRequest(**message)
        if self._config is not None and self.sends_modes:
            request.protocol_config.CopyFrom(self._config)
            self._config = None
        if self._subset is not None:
            request.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({SUBSET: self._subset})
        self.call.write(request.SerializeToString())

    async def head(self, path: str, *more: tuple[str, str], method: str = "POST", ends: bool = False) -> None:
        """Send the head of a request."""
        await self.send(request_headers=headers([(":method", method), (":path", path), *more], ends))

    async def body(self, *parts: bytes, ends: bool = True) -> None:
        """Send the body of a request."""
        for number, part in enumerate(parts, 1):
            await self.send(request_body=pb.HttpBody(body=part, end_of_stream=ends and number == len(parts)))

    async def answer_head(self, status: int, *more: tuple[str, str], ends: bool = False, **message: Any) -> None:
        """Send the head of a response."""
        await self.send(response_headers=headers([(":status", str(status)), *more], ends), **message)

    async def answer_body(self, part: bytes, ends: bool = False) -> None:
        """Send bytes of a response."""
        await self.send(response_body=pb.HttpBody(body=part, end_of_stream=ends))

    async def receive(self) -> pb.ProcessingResponse:
        """Return the next message of the picker."""
        data = await self.call.read()
        assert data is not None, f"the picker ended the stream: {await self.call.status()}"
        return pb.ProcessingResponse.FromString(data)

    async def finish(self) -> None:
        """End the stream, as Envoy does at the end of a response."""
        self.call.done_writing()
        await self.until_ended()

    async def until_ended(self) -> None:
        """Wait until the picker ends the stream, and assert that it sends nothing more."""
        assert await self.call.read() is None


def headers(pairs: Sequence[tuple[str, str]], ends: bool = False) -> pb.HttpHeaders:
    """Return a message with headers, as Envoy sends it."""
    found = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=found), end_of_stream=ends)


def set_headers(mutation: pb.HeaderMutation) -> dict[str, str]:
    """Return the headers that a mutation sets."""
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def streamed(part: pb.BodyResponse) -> tuple[bytes, bool]:
    """Return a streamed part of a body, and whether it is the last."""
    response = part.response.body_mutation.streamed_response
    return response.body, response.end_of_stream
