"""One request on its way to one worker, as the one who sent it sees it."""

from __future__ import annotations

import asyncio

from router.upstream.response_handler import ChunkForwarder, ResponseHandler, UnreachableError, UpstreamError


class RequestConnection:
    """What a request asks of the connection that it is on."""

    __slots__ = ()

    def pause(self) -> None:
        """Read no more for now: the client does not either."""
        raise NotImplementedError

    def resume(self) -> None:
        """Read on."""
        raise NotImplementedError

    def abort(self) -> None:
        """Close at once. The request's handler hears nothing more."""
        raise NotImplementedError


class UpstreamRequest:
    """One request on its way to one worker.

    `request` is written at once: all of it, or the head where `body` is written after it. `handler`: None once all of
    the answer came. `connection`: None while one is made by the task `connecting`, and after the end. `sent_before`:
    over a kept connection that turned out to be closed.

    `forwarder` gets whole chunks of whole lines of the answer's body as they come; None while the handler gets all.
    """

    __slots__ = (
        "body",
        "connecting",
        "connection",
        "forwarder",
        "handler",
        "method",
        "paused",
        "request",
        "sent_before",
    )

    def __init__(self, handler: ResponseHandler, method: str, request: bytes, body: bytes = b"") -> None:
        self.method = method
        self.request = request
        self.body = body
        self.handler: ResponseHandler | None = handler
        self.forwarder: ChunkForwarder | None = None
        self.connection: RequestConnection | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.paused = False
        self.sent_before = False

    def pause(self) -> None:
        """Read no more of the answer for now."""
        self.paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Read on."""
        self.paused = False
        if self.connection is not None:
            self.connection.resume()

    def abort(self) -> None:
        """Call the request off. The handler hears nothing more."""
        self.handler = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()
        if self.connecting is not None:
            self.connecting.cancel()

    def fail(self, error: UpstreamError) -> None:
        """The answer will not come, or not to its end."""
        handler, self.handler = self.handler, None
        self.connecting = None
        if self.sent_before and isinstance(error, UnreachableError):
            error = UpstreamError(f"closed before it answered; then {error}")
        if handler is not None:
            handler.on_failed(error)
