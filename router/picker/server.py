"""The gRPC services: Envoy's external processor, and health."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
from fastapi import FastAPI
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.picker import ext_proc_pb2 as pb
from router.picker.observer import observe
from router.picker.own_answers import OwnAnswers
from router.picker.request import PickedRequest, PickerState
from router.readiness import Readiness
from router.settings import Settings

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
# Beside a whole body in one message.
_MESSAGE_MARGIN = 2**20
_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 2**31 - 1),
    # An Envoy that vanished is noticed, and its requests are released.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
]
_HEALTH_SECONDS = 0.5


class ExternalProcessor:
    """Serves the streams of Envoys, one for each request."""

    def __init__(self, state: PickerState) -> None:
        self._state = state

    def handler(self) -> grpc.GenericRpcHandler:
        """What a server is told of it."""
        process = grpc.stream_stream_rpc_method_handler(
            self._process, request_deserializer=pb.ProcessingRequest.FromString
        )
        return grpc.method_handlers_generic_handler(SERVICE, {"Process": process})

    async def _process(self, _: object, context: Any) -> None:
        message = await context.read()
        if message is grpc.aio.EOF:
            return
        if message.observability_mode:
            while message is not grpc.aio.EOF and observe(message, self._state):
                message = await context.read()
            return
        outbox = _Outbox(context)
        request = PickedRequest(self._state, outbox.put)
        try:
            while message is not grpc.aio.EOF:
                with outbox.gathering():
                    request.received(message)
                await outbox.flush()
                if request.refused:
                    break
                message = await context.read()
        finally:
            request.closed()
            await outbox.close()


class _Outbox:
    """Messages for Envoy, sent in their order."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._messages: deque[bytes] = deque()
        self._gathering = False
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def put(self, message: bytes) -> None:
        """Send a message: when what is gathered is flushed, or else soon."""
        self._messages.append(message)
        if not self._gathering and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self.flush())

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Who puts will flush."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False

    async def flush(self) -> None:
        """Send what is here."""
        async with self._lock:
            while self._messages:
                await self._context.write(self._messages.popleft())

    async def close(self) -> None:
        """Send nothing more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """`liveness` while this runs; all else once requests can be placed."""

    def __init__(self, readiness: Readiness) -> None:
        self._readiness = readiness

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        """How a service is now."""
        status = self._status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: ARG002, N802
        """The same, and whenever it changes."""
        told = None
        while True:
            if (status := self._status(request.service)) != told:
                told = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_HEALTH_SECONDS)

    def _status(self, service: str) -> int:
        if service == "liveness":
            return int(_Status.SERVING)
        if service not in ("", "readiness", SERVICE):
            return int(_Status.SERVICE_UNKNOWN)
        return int(_Status.NOT_SERVING if self._readiness.problem() else _Status.SERVING)


_Status = health_pb2.HealthCheckResponse


@asynccontextmanager
async def running_picker(app: FastAPI, settings: Settings) -> AsyncIterator[int]:
    """Serve Envoys beside a router's application; the port. At its end, requests have the server's time to finish.

    Raises OSError when the address cannot be bound.
    """
    router = app.state
    state = PickerState(router.proxy_context, router.fleet, settings.picker, OwnAnswers(router.fleet))
    state.fleet.on_removed.append(lambda worker: state.addresses.forget(worker.url))
    size = ("grpc.max_receive_message_length", settings.server.max_body_bytes + _MESSAGE_MARGIN)
    server = grpc.aio.server(options=[*_OPTIONS, size])
    server.add_generic_rpc_handlers((ExternalProcessor(state).handler(),))
    health_pb2_grpc.add_HealthServicer_to_server(_Health(router.readiness), server)
    port = _bind(server, settings)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(settings.server.shutdown_timeout)
        await state.addresses.close()


def _bind(server: Any, settings: Settings) -> int:
    picker = settings.picker
    host = f"[{settings.server.host}]" if ":" in settings.server.host else settings.server.host
    address = f"{host}:{picker.port}"
    try:
        if picker.certificate is not None and picker.key is not None:
            pair = (picker.key.read_bytes(), picker.certificate.read_bytes())
            return int(server.add_secure_port(address, grpc.ssl_server_credentials([pair])))
        return int(server.add_insecure_port(address))
    except RuntimeError as error:
        raise OSError(f"{address} cannot be bound: {error}") from error
