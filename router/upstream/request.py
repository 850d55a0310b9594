"""One request to a worker: its state, the handler of its response, and the transports that can send it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from mypy_extensions import mypyc_attr

from router.fleet.worker import Worker
from router.http.headers import Headers, ResponseHead


class UpstreamError(Exception):
    """A worker's response was not received completely."""


class UnreachableError(UpstreamError):
    """No connection to the worker could be opened."""


class UpstreamTimeoutError(UpstreamError):
    """A worker sent nothing for too long."""


@mypyc_attr(allow_interpreted_subclasses=True)
class ResponseHandler:
    """The receiver of a response. After the last byte, `on_failed` or an abort, no method is called any more."""

    __slots__ = ()

    def on_head(self, head: ResponseHead, data: bytes, ended: bool) -> None:
        """Called when the head is received, with the bytes of the body that follow it."""
        raise NotImplementedError

    def on_body(self, data: bytes, ended: bool) -> None:
        """Called when more of the body is received."""
        raise NotImplementedError

    def on_failed(self, error: UpstreamError) -> None:
        """Called when the response fails before its end."""
        raise NotImplementedError


@mypyc_attr(allow_interpreted_subclasses=True)
class ChunkForwarder:
    """The receiver of complete chunks of complete lines, which bypass the handler."""

    __slots__ = ()

    def forward(self, chunks: bytes) -> bool:
        """Forward chunks. Return false if they must be parsed; nothing is forwarded then."""
        raise NotImplementedError


class RequestConnection:
    """The methods of a connection that a request calls. `closed`: the worker closed it."""

    __slots__ = ("closed",)

    def __init__(self) -> None:
        self.closed = False

    def pause(self) -> None:
        """Stop reading, because the client does not read."""
        raise NotImplementedError

    def resume(self) -> None:
        """Continue reading."""
        raise NotImplementedError

    def abort(self) -> None:
        """Close the connection at once, without calling the request's handler."""
        raise NotImplementedError


class UpstreamRequest:
    """One request in flight to one worker.

    - `request`: the bytes to write at once: everything, or only the head if `body` is set.
    - `body`: a large body, written after the head.
    - `connection`: None while the task `connecting` opens one, and after the end.
    - `answered_on`: the connection of a complete response.
    - `sent_before`: the request was sent over a kept connection that was already closed.
    - `forwarder`: receives complete chunks of complete lines; None while the handler receives everything.
    """

    __slots__ = (
        "answered_on",
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
        self.answered_on: RequestConnection | None = None
        self.connecting: asyncio.Task[None] | None = None
        self.paused = False
        self.sent_before = False

    def pause(self) -> None:
        """Stop reading the response."""
        self.paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        """Continue reading the response."""
        self.paused = False
        if self.connection is not None:
            self.connection.resume()

    def abort(self) -> None:
        """Cancel the request, without calling the handler any more."""
        self.handler = None
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()
        if self.connecting is not None:
            self.connecting.cancel()

    def fail(self, error: UpstreamError) -> None:
        """Report to the handler that the response will not be completed."""
        handler, self.handler = self.handler, None
        self.connecting = None
        if self.sent_before and isinstance(error, UnreachableError):
            error = UpstreamError(f"closed before it answered; then {error}")
        if handler is not None:
            handler.on_failed(error)


class SentRequest(Protocol):
    """A request in flight to a worker, over any transport."""

    def abort(self) -> None:
        """Cancel the request, because the response is not needed any more."""

    def pause(self) -> None:
        """Stop reading the response."""

    def resume(self) -> None:
        """Continue reading the response."""


class Transport(Protocol):
    """A replacement for the router's own sending. It sends a request once and reports the head of the response."""

    def send(self, worker: Worker, answer: ResponseHandler, headers: Headers, body: bytes) -> SentRequest:
        """Send a request with these headers and this body; `answer` receives the response."""
