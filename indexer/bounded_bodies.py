"""Bodies of requests are bounded in size and in time, for every route of an application alike.

What is sent beyond its bounds is not read: the request is refused and its connection closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from indexer.errors import RequestError, error_body, error_headers


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """Of a request's body: bytes, and seconds from its head to its end."""

    bytes: int = 64 * 2**20
    seconds: float = 60.0


class BoundedBodies:
    """Before an application: refuses a body with 413 or 408 where the application would go on to read it."""

    def __init__(self, app: ASGIApp, limits: BodyLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body = _Body(receive, self._limits, scope["headers"])
        begun = False

        async def closing_send(message: Message) -> None:
            nonlocal begun
            begun = True
            if not body.whole and message["type"] == "http.response.start":  # else the rest would be read
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        try:
            await self._app(scope, body.receive, closing_send)
        except RequestError as error:
            if begun or error is not body.refusal:
                raise
            answer = error_body(error)
            await closing_send(
                {"type": "http.response.start", "status": error.status, "headers": error_headers(error, answer)}
            )
            await send({"type": "http.response.body", "body": answer})


class _Body:
    """A body as it comes."""

    def __init__(self, receive: Receive, limits: BodyLimits, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.refusal: RequestError | None = None
        self._receive = receive
        self._limits = limits
        self._deadline = asyncio.get_running_loop().time() + limits.seconds
        self._announced = max((int(value) for name, value in headers if name == b"content-length"), default=0)
        self._size = 0
        self.whole = not self._announced and all(name != b"transfer-encoding" for name, _ in headers)

    async def receive(self) -> Message:
        """The next message. Raises RequestError: 413 for too large a body, 408 for one that takes too long."""
        if self.whole:  # what comes now is the client's leaving, for which there is no deadline
            return await self._receive()
        if self._announced > self._limits.bytes:
            raise self._too_large()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError as error:
            late = f"The body did not come within {self._limits.seconds:g} s."
            self.refusal = RequestError(
                f"{late} Send it faster, or raise server.body_timeout.", status=408, type="timeout_error"
            )
            raise self.refusal from error
        self._size += len(message.get("body", b""))
        if self._size > self._limits.bytes:
            raise self._too_large()
        self.whole = not message.get("more_body")
        return message

    def _too_large(self) -> RequestError:
        large = f"The body is larger than {self._limits.bytes} bytes. Send less, or raise server.max_body_bytes."
        self.refusal = RequestError(large, status=413)
        return self.refusal
