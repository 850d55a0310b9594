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
        """`request`, `answer`: how their bodies are sent. `subset`: what the gateway's metadata say."""
        self.call = GrpcCall(channel, METHOD)
        self.tells_modes = True
        self._config: Any = pb.ProtocolConfiguration(request_body_mode=request, response_body_mode=answer)
        self._subset = subset

    async def tell(self, **message: Any) -> None:
        """Send a message."""
        told = pb.ProcessingRequest(**message)
        if self._config is not None and self.tells_modes:
            told.protocol_config.CopyFrom(self._config)
            self._config = None
        if self._subset is not None:
            told.metadata_context.filter_metadata["envoy.lb.subset_hint"].update({SUBSET: self._subset})
        self.call.write(told.SerializeToString())

    async def head(self, path: str, *more: tuple[str, str], method: str = "POST", ends: bool = False) -> None:
        """The head of a request."""
        await self.tell(request_headers=headers([(":method", method), (":path", path), *more], ends))

    async def body(self, *parts: bytes, ends: bool = True) -> None:
        """The body of a request."""
        for number, part in enumerate(parts, 1):
            await self.tell(request_body=pb.HttpBody(body=part, end_of_stream=ends and number == len(parts)))

    async def answer_head(self, status: int, *more: tuple[str, str], ends: bool = False, **message: Any) -> None:
        """The head of an answer."""
        await self.tell(response_headers=headers([(":status", str(status)), *more], ends), **message)

    async def answer_body(self, part: bytes, ends: bool = False) -> None:
        """Bytes of an answer."""
        await self.tell(response_body=pb.HttpBody(body=part, end_of_stream=ends))

    async def hears(self) -> pb.ProcessingResponse:
        """The next message of the picker."""
        heard = await self.call.read()
        assert heard is not None, f"the picker ended the stream: {await self.call.status()}"
        return pb.ProcessingResponse.FromString(heard)

    async def ends(self) -> None:
        """Be done, as Envoy is at the end of an answer."""
        self.call.done_writing()
        await self.is_ended()

    async def is_ended(self) -> None:
        """Nothing more comes."""
        assert await self.call.read() is None


def headers(pairs: Sequence[tuple[str, str]], ends: bool = False) -> pb.HttpHeaders:
    """A head as Envoy sends it."""
    found = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in pairs]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=found), end_of_stream=ends)


def set_headers(mutation: pb.HeaderMutation) -> dict[str, str]:
    """The headers that a mutation sets."""
    return {option.header.key: option.header.raw_value.decode() for option in mutation.set_headers}


def streamed(part: pb.BodyResponse) -> tuple[bytes, bool]:
    """A part of a body that is to be passed on, and whether it is the last."""
    told = part.response.body_mutation.streamed_response
    return told.body, told.end_of_stream
