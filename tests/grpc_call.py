"""Calls of grpcio's own threads, for asynchronous tests.

The asyncio client of grpcio drops messages that arrive just before the end of a call. It also reports calls of an ended
event loop to later ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from queue import SimpleQueue
from threading import Thread

import grpc

_PATIENCE = 60.0


class GrpcCall:
    """A call with messages both ways, as bytes."""

    def __init__(self, channel: grpc.Channel, method: str) -> None:
        self._to_send: SimpleQueue[bytes | None] = SimpleQueue()
        self._heard: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._call = channel.stream_stream(method)(iter(self._to_send.get, None))
        Thread(target=self._listen, daemon=True).start()  # ends with the call

    def _listen(self) -> None:
        with suppress(grpc.RpcError):
            for message in self._call:
                self._hear(message)
        self._hear(None)
        self.done_writing()

    def _hear(self, message: bytes | None) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._heard.put_nowait, message)

    def write(self, message: bytes) -> None:
        """Send a message."""
        self._to_send.put(message)

    def done_writing(self) -> None:
        """Send no more."""
        self._to_send.put(None)

    async def read(self) -> bytes | None:
        """The next message; None at the end."""
        if self._ended:
            return None
        heard = await asyncio.wait_for(self._heard.get(), _PATIENCE)
        self._ended = heard is None
        return heard

    def cancel(self) -> None:
        """End the call."""
        self._call.cancel()

    async def status(self) -> tuple[grpc.StatusCode, str]:
        """Return the status code and the details with which the call ended."""
        while await self.read() is not None:
            pass
        return self._call.code(), self._call.details()


@asynccontextmanager
async def channel_to(
    port: int, trusted: bytes | None = None, compression: grpc.Compression | None = None
) -> AsyncIterator[grpc.Channel]:
    """Open a channel to a server on this machine. `trusted` is the certificate of the server's issuer (PEM)."""
    address, options = f"127.0.0.1:{port}", [("grpc.max_receive_message_length", -1)]
    if trusted is None:
        channel = grpc.insecure_channel(address, options, compression)
    else:
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(trusted), options, compression)
    with channel:
        yield channel
