"""uvicorn's class, for those requests of a connection that are not for workers. The connection reads them."""

from __future__ import annotations

import asyncio
import inspect
from typing import Protocol

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from router.server.incoming_request import IncomingRequest


class Connection(Protocol):
    """The connection that the requests come over."""

    def asgi_response_ended(self) -> None:
        """A request is answered."""


class _ReadHead:
    """What uvicorn's class asks its parser: here of a request whose head was read before."""

    def __init__(self, request: IncomingRequest) -> None:
        self._request = request

    def get_method(self) -> bytes:
        return self._request.method

    def get_http_version(self) -> str:
        return self._request.version

    def should_keep_alive(self) -> bool:
        return self._request.keep_alive

    def should_upgrade(self) -> bool:
        return False


class AsgiFallback(HttpToolsProtocol):
    """Serves requests by ASGI, each as soon as its head is read, and one at a time."""

    def __init__(
        self,
        connection: Connection,
        transport: asyncio.Transport,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(config, server_state, app_state, loop)
        self._connection = connection
        self.connection_made(transport)
        self.connections.discard(self)  # the connection itself is among them

    @property
    def busy(self) -> bool:
        """Whether a request is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def owes_response(self) -> bool:
        """Whether that request came whole."""
        return self.busy and not self.cycle.more_body

    @property
    def answering(self) -> bool:
        """Whether its answer has begun."""
        return self.busy and self.cycle.response_started

    @property
    def keep_alive(self) -> bool:
        """Whether another request may follow the last one."""
        return not self.busy or self.cycle.keep_alive

    def take(self, request: IncomingRequest) -> None:
        """Serve a request, of which the head came and perhaps more."""
        self.parser = _ReadHead(request)  # type: ignore[assignment]
        self.on_message_begin()
        self.on_url(request.target)
        for name, value in request.headers:
            self.on_header(name, value)
        self.on_headers_complete()
        if request.body:
            self.on_body(request.take_body())
        if request.complete:
            self.on_message_complete()

    def shutdown(self) -> None:
        if self.busy and not self.owes_response:
            self.transport.close()  # who knows when the rest comes
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
        self._connection.asgi_response_ended()


# What is used of uvicorn's class, and how it is called.
_METHODS = {
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "on_message_begin": ["self"],
    "on_url": ["self", "url"],
    "on_header": ["self", "name", "value"],
    "on_headers_complete": ["self"],
    "on_body": ["self", "body"],
    "on_message_complete": ["self"],
    "on_response_complete": ["self"],
    "shutdown": ["self"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
}
_ATTRIBUTES = {"parser", "transport", "flow", "cycle", "connections", "server_state"}
_CYCLE_ATTRIBUTES = {"response_complete", "response_started", "keep_alive", "more_body"}


def uvicorn_fits(protocol: type = HttpToolsProtocol, cycle: type = RequestResponseCycle) -> bool:
    """Whether uvicorn's classes are as this module knows them."""
    for name, parameters in _METHODS.items():
        method = getattr(protocol, name, None)
        if method is None or list(inspect.signature(method).parameters) != parameters:
            return False
    known, known_of_cycle = _names_in_init(protocol), _names_in_init(cycle)
    return known >= _ATTRIBUTES and known_of_cycle >= _CYCLE_ATTRIBUTES


def _names_in_init(kind: type) -> set[str]:
    return set(inspect.getattr_static(kind, "__init__").__code__.co_names)
