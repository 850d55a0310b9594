"""The same methods served by grpcio: slower, and a second opinion. `picker.fast_lane: false` takes it."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

import grpc

from router.picker.grpc_calls import OK, Method, Methods
from router.picker.tls import Certificate

_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_concurrent_streams", 2**31 - 1),
    # An Envoy that vanished is noticed, and its requests are released.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
]
_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioServer:
    """Serves methods. `stop` gives the calls that are under way some time to end."""

    def __init__(self, methods: Methods, largest_message: int) -> None:
        """`largest_message`: in bytes."""
        options = [*_OPTIONS, ("grpc.max_receive_message_length", largest_message)]
        self._server = grpc.aio.server(options=options)
        services: dict[str, dict[str, Any]] = {}
        for path, method in methods.items():
            _, service, name = path.split("/")
            # What is asked once and answered once is a stream of one message each way.
            services.setdefault(service, {})[name] = grpc.stream_stream_rpc_method_handler(_serving(method))
        for service, handlers in services.items():
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))

    async def start(self, host: str, port: int, certificate: Certificate | None) -> int:
        """Listen; the port. Raises OSError."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if certificate is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, _credentials(certificate))
        except RuntimeError as error:
            raise OSError(str(error)) from error
        await self._server.start()
        return int(bound)

    async def stop(self, seconds: float) -> None:
        """Take no new calls; end those that are left after so long."""
        await self._server.stop(seconds)


def _credentials(certificate: Certificate) -> Any:
    """Those of the certificate as it is whenever a connection begins."""

    def configuration() -> Any:
        return grpc.ssl_server_certificate_configuration([certificate.read()])

    return grpc.dynamic_ssl_server_credentials(configuration(), configuration)


def _serving(method: Method) -> Any:
    async def serve(_: object, context: Any) -> None:
        call = _Call(context)
        handler = method(call)
        try:
            while not call.ended.done():
                reading = asyncio.ensure_future(context.read())
                await asyncio.wait({reading, call.ended}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():
                    reading.cancel()
                    break
                message = reading.result()
                if message is grpc.aio.EOF:
                    handler.peer_ended()
                    break
                handler.received(message)
            await call.ended
            await call.flush()
        finally:
            handler.closed()
            await call.close()

    return serve


class _Call:
    """A call of grpcio's: messages are sent in their order."""

    def __init__(self, context: Any) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._context = context
        self._messages: deque[bytes] = deque()
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def send(self, *messages: bytes) -> None:
        """Send messages, with what else is sent soon."""
        self._messages += messages
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self.flush())

    def end(self, status: int = OK, reason: str = "") -> None:
        """End the call."""
        if not self.ended.done():
            self._context.set_code(_CODES[status])
            self._context.set_details(reason)
            self.ended.set_result(None)

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
