"""The compared gRPC servers, each with equal answers: every request is sent to one worker.

python -m benchmarks.envoy.grpc_servers SERVER PORT WORKER
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, cast

import uvloop

from router.picker import process_responses
from router.picker.external_processor import SERVICE
from router.picker.grpc_server import Call, GrpcServer
from router.picker.process_responses import field

_HOST: Final = "127.0.0.1"
_LARGEST: Final = 2**22
_PATH: Final = f"/{SERVICE}/Process"
# The load's connections as concurrent calls, and some more.
THREADS: Final = 64

# Fields of ProcessingRequest: a message begins with the field of its kind.
_REQUEST_HEADERS: Final = 2
_REQUEST_BODY: Final = 4

_KEEP_REQUEST_BODY: Final = field(3, b"")


class Answers:
    """The answers to messages."""

    def __init__(self, worker: str) -> None:
        self._routed = process_responses.Routed(worker, "1", [], [], None, []).to_headers()

    def to(self, message: bytes) -> bytes:
        """Return the answer to a `ProcessingRequest`."""
        kind = message[0] >> 3
        if kind == _REQUEST_HEADERS:
            return self._routed
        return _KEEP_REQUEST_BODY if kind == _REQUEST_BODY else process_responses.KEEP_RESPONSE_HEADERS


class _Handler:
    """A call of our own server."""

    def __init__(self, answers: Answers, call: Call) -> None:
        self._answers = answers
        self._call = call

    def received(self, message: bytes) -> None:
        self._call.send(self._answers.to(message))

    def peer_ended(self) -> None:
        self._call.end()

    def closed(self) -> None:
        """Ignore the end: the call has no state."""


async def _ours(answers: Answers, port: int) -> None:
    server = GrpcServer({_PATH: lambda call: _Handler(answers, call)}, _LARGEST)
    await server.start(_HOST, port, None)
    await asyncio.Event().wait()


async def _grpcio_asyncio(answers: Answers, port: int) -> None:
    import grpc

    async def process(messages: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
        async for message in messages:
            yield answers.to(message)

    handlers = {"Process": grpc.stream_stream_rpc_method_handler(process)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"{_HOST}:{port}")
    await server.start()
    await server.wait_for_termination()


async def _grpclib(answers: Answers, port: int) -> None:
    from grpclib.const import Cardinality, Handler
    from grpclib.server import Server

    class Unread:
        """A codec that leaves messages as bytes."""

        __content_subtype__ = "proto"

        def encode(self, message: Any, message_type: Any) -> bytes:  # noqa: ARG002
            return bytes(message)

        def decode(self, data: bytes, message_type: Any) -> Any:  # noqa: ARG002
            return data

    async def process(stream: Any) -> None:
        async for message in stream:
            await stream.send_message(answers.to(message))

    class Service:
        def __mapping__(self) -> Mapping[str, Any]:
            return {_PATH: Handler(process, Cardinality.STREAM_STREAM, bytes, bytes)}

    server = Server([Service()], codec=cast(Any, Unread()))
    await server.start(_HOST, port)
    await server.wait_closed()


def _grpcio_threads(answers: Answers, port: int) -> None:
    import grpc

    def process(messages: Iterator[bytes], _: object) -> Iterator[bytes]:
        return map(answers.to, messages)

    handlers = {"Process": grpc.stream_stream_rpc_method_handler(process)}
    server = grpc.server(ThreadPoolExecutor(THREADS), [grpc.method_handlers_generic_handler(SERVICE, handlers)])
    server.add_insecure_port(f"{_HOST}:{port}")
    server.start()
    server.wait_for_termination()


_ON_LOOPS: dict[str, Callable[[Answers, int], Awaitable[None]]] = {
    "grpclib": _grpclib,
    "grpcio, asyncio": _grpcio_asyncio,
    "ours": _ours,
}
_SYNCHRONOUS: dict[str, Callable[[Answers, int], None]] = {"grpcio, threads": _grpcio_threads}
NAMES = (*_SYNCHRONOUS, *_ON_LOOPS)


def main(name: str, port: int, worker: str) -> None:
    """Serve until the process ends."""
    answers = Answers(worker)
    if name in _SYNCHRONOUS:
        _SYNCHRONOUS[name](answers, port)
    else:

        async def serve() -> None:
            await _ON_LOOPS[name](answers, port)

        uvloop.run(serve())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
