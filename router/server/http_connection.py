"""A client's HTTP/1.1 connection: its requests are read, admitted, served in their turn, and answered.

    RequestReader ──▶ head ──▶ RequestContext ──▶ body ──▶ Dispatcher ──▶ FramedResponse ──▶ the next request

A connection serves one request at a time, and none while its client does not read. Pipelined requests are parsed and
queued, and reading pauses until they are served.

One file, because it is the state of one connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

from uvicorn.config import Config
from uvicorn.server import ServerState

from http_api.errors import RequestError
from router.auth import too_large, too_slow
from router.forwarding.dispatcher import Dispatcher
from router.forwarding.exchange import ServedRequest
from router.forwarding.request_context import RequestHead, ServerAddress
from router.http.event_loop import Deadline
from router.http.headers import Headers, ResponseHead
from router.http.unparsed import RecentHeads
from router.http.websocket import WebSocketPeer
from router.server.framed_response import FramedResponse, ResponseOwner, bad_request
from router.server.request_reader import IncomingRequest, RequestReader, RequestReceiver
from router.server.sockets import probe

if TYPE_CHECKING:
    from router.picker.http2.headers import RequestHeaders
    from router.picker.http2.stream import Stream, StreamHandler

_HTTP2: Final = b"PRI * HTTP/2.0\r\n"  # the first line of its preface
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
# How long the rest of a refused body is read, so that its client can read the response. The router closes its sending
# side first, so that a client that reads stops sending.
_LINGER_SECONDS: Final = 5.0


class _Intake(Enum):
    """The treatment of received bytes."""

    OPEN = "requests are parsed, and served in their turn"
    UNREADABLE = "the bytes cannot be parsed, which is answered after all earlier requests"
    LINGERING = "the rest of a refused request is read and dropped"


# A look-up in the enumeration would cost more than the comparison.
_OPEN: Final = _Intake.OPEN
_UNREADABLE: Final = _Intake.UNREADABLE
_LINGERING: Final = _Intake.LINGERING


class HttpConnection(RequestReceiver, ResponseOwner):
    """A client's connection: a protocol of asyncio's, which uvicorn's server creates, counts and shuts down."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        recent: RecentHeads[RequestHead],
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],  # noqa: ARG002 - uvicorn passes it
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Create a connection. `recent`: the heads of recent requests, shared by all connections."""
        self._dispatcher = dispatcher
        self._limits = settings = dispatcher.settings
        self._server_state = server_state
        self._loop = _loop or asyncio.get_event_loop()
        self._keep_alive_seconds = float(config.timeout_keep_alive)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._write_paused = False
        self._deadline = Deadline(self._loop, self._late)
        # Receiving.
        self._received = False  # any bytes: HTTP/2 begins with the first ones
        self._address: ServerAddress | None = None  # where the client connected to
        self._reader = RequestReader(self, recent, self._deadline, settings.root_path.encode())
        self._intake = _OPEN
        self._problem = ""  # why the bytes cannot be parsed
        self._half_closed = False  # the client has closed its sending side
        self._queue: deque[IncomingRequest] | None = None  # created for the first request that has to wait
        # Serving. A request with a cached head was received whole, and is not an `IncomingRequest`.
        self._response: FramedResponse | None = None
        self._request: IncomingRequest | None = None
        self._arriving = 0  # bytes of its body until that is complete
        self._current: ServedRequest | None = None  # once its body is complete
        self._answered = False  # a response has ended since bytes were last received

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._address = _address(transport.get_extra_info("sockname"))
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # with all methods that uvicorn calls
        self._reader.begin()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._response is not None:
            if self._current is not None:
                self._current.client_disconnected()
            else:
                self._response.context.abandoned()
            self._end_request()
        self._queue = None
        self._deadline.close()
        self._reader.close()
        self._server_state.connections.discard(self)
        if exc is None:
            self._transport.close()

    def eof_received(self) -> bool:
        """Called when the client closes its sending side. Keep the connection if a response is due."""
        if not self._owes_response or not self._came_whole:
            return False
        self._half_closed = True
        if self._queue and not self._queue[-1].complete:
            self._queue.pop()  # it stays incomplete
        current = self._current
        return probe(self._loop, self._transport, current is not None and current.answering)

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._current is not None:
            self._current.pause()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._current is not None:
            self._current.resume()
        if self._queue:
            self._plan_next()

    def shutdown(self) -> None:
        """Close the connection, after the response to its request. Called when the server stops."""
        if self._response is not None and not self._came_whole:
            self._refuse(self._response, _stopping())  # its body may never be complete
            self._transport.close()
        elif self._response is not None:
            self._response.keep_alive = False
            self._queue = None
        else:
            self._transport.close()

    @property
    def answering(self) -> bool:
        """True while a request is not answered."""
        return self._response is not None

    def _late(self) -> None:
        """Called when a head, a body, the next request or the rest of a refused request is late."""
        if self._response is not None and not self._came_whole:
            self._refuse(self._response, too_slow(self._limits))
        else:
            self._transport.close()

    # Receiving

    def data_received(self, data: bytes) -> None:
        first, self._received = not self._received, True
        if not self._busy and not self._queue and self._intake is _OPEN:
            known = self._reader.read_known(data)
            if known is not None:
                head, body = known
                self._serve_known(head, body)
                return
        self._answered = False
        if first and data.startswith(_HTTP2) and self._speak_http2():
            self._transport.get_protocol().data_received(data)  # type: ignore[attr-defined]
            return
        self._reader.parse(data)

    def _speak_http2(self) -> bool:
        """Give the connection to HTTP/2, whose preface was received. Return False without the package that it needs."""
        try:
            from router.server.http2_requests import Http2Request, connection_of
        except ImportError:  # hpack, of the extra `envoy`
            return False
        dispatcher, state, address, loop = self._dispatcher, self._server_state, self._address, self._loop

        def accept(headers: RequestHeaders, stream: Stream) -> StreamHandler:
            return Http2Request(headers, stream, dispatcher, state, address, loop)

        switched = connection_of(accept, state, loop)
        self._deadline.close()
        self._reader.close()
        state.connections.discard(self)
        self._transport.set_protocol(switched)
        switched.connection_made(self._transport)
        return True

    def head_read(self, request: IncomingRequest) -> None:
        if not self._takes_more:
            return
        if self._busy or self._queue or self._answered:
            self._enqueue(request)
        else:
            self._serve(request)

    def _enqueue(self, request: IncomingRequest) -> None:
        """Queue a request. Between pipelined requests, other connections are served."""
        if self._queue is None:
            self._queue = deque()
        if not self._queue and not self._busy:
            self._loop.call_soon(self._serve_next)
        self._queue.append(request)
        self._transport.pause_reading()
        if self._write_paused:
            self._deadline.set(self._keep_alive_seconds)

    def body_read(self, request: IncomingRequest, data: bytes) -> None:
        if request is self._request or (self._queue is not None and request in self._queue):
            if request is self._request and not self._has_room(len(data)):
                return
            request.size += len(data)
            if request.size <= self._limits.max_body_bytes:
                request.body.append(data)
            elif request is self._request and self._response is not None:
                self._refuse(self._response, too_large(self._limits))

    def _has_room(self, size: int) -> bool:
        try:
            self._dispatcher.contexts.gate.arrivals.add(self._arriving, size)
        except RequestError as error:
            if self._response is not None:
                self._refuse(self._response, error)
            return False
        self._arriving += size
        return True

    def _end_arrival(self) -> None:
        if self._arriving:
            self._dispatcher.contexts.gate.arrivals.end(self._arriving)
            self._arriving = 0

    def request_read(self, request: IncomingRequest) -> None:
        if request is self._request and self._response is not None:
            self._deadline.clear()
            self._start(self._response, request.take_body())
        elif self._intake is _LINGERING:
            self._transport.close()

    def refuse_rest(self, problem: str) -> None:
        if self._transport.is_closing():
            return
        if self._response is not None and not self._came_whole:
            self._response.context.answered(400, [])
            self._end_request()
        if self._intake is _LINGERING:
            self._transport.close()
        elif self._owes_response:
            self._intake, self._problem = _UNREADABLE, problem
            self._transport.pause_reading()
        else:
            self._close_unreadable(problem)

    def _close_unreadable(self, problem: str) -> None:
        self._transport.write(bad_request(self._server_state, problem))
        self._transport.close()

    # Requests in their turn

    @property
    def _came_whole(self) -> bool:
        """The request that is served is complete."""
        return self._request is None or self._request.complete

    @property
    def _busy(self) -> bool:
        """True if the next request has to wait: for a response, or for a client that does not read."""
        return self._response is not None or self._write_paused

    @property
    def _owes_response(self) -> bool:
        """A complete request waits for its response."""
        if self._response is not None:
            return True
        return self._queue is not None and any(request.complete for request in self._queue)

    @property
    def _takes_more(self) -> bool:
        """True if another request may follow the last one."""
        if self._intake is _LINGERING or self._transport.is_closing():
            return False
        if self._queue:
            return self._queue[-1].keep_alive
        return self._response is None or self._response.keep_alive

    def _plan_next(self) -> None:
        """Serve the next request in the queue; after the last, answer what could not be parsed."""
        if self._queue:
            self._loop.call_soon(self._serve_next)
        elif self._intake is _UNREADABLE and not self._owes_response and not self._transport.is_closing():
            self._close_unreadable(self._problem)

    def _serve_next(self) -> None:
        queue = self._queue
        if self._busy or not queue or self._transport.is_closing():
            return
        request = queue.popleft()
        if self._intake is _UNREADABLE and not request.complete:
            if not self._owes_response:
                self._close_unreadable(self._problem)
            return
        if not queue and self._intake is not _UNREADABLE:
            self._transport.resume_reading()
        self._serve(request)

    # One request

    def _serve(self, request: IncomingRequest) -> None:
        head = request.make_head(self._dispatcher.repeated_paths)
        self._request = request
        size = request.size if request.complete else max(request.size, request.announced_size())
        response = self._begin_response(head, size, request.keep_alive, request.version == "1.1")
        if response is None:
            return
        if request.complete:
            self._deadline.clear()
            self._start(response, request.take_body())
            return
        if request.expects_continue and not request.body and request.version == "1.1":
            self._transport.write(_CONTINUE)
        self._deadline.set(self._limits.body_timeout)

    def _serve_known(self, head: RequestHead, body: bytes) -> None:
        """Serve a complete request whose head is cached. Such a request keeps its connection alive."""
        response = self._begin_response(head, len(body), True, True)
        if response is not None:
            self._start(response, body)

    def _begin_response(
        self, head: RequestHead, size: int, keep_alive: bool, chunks_allowed: bool
    ) -> FramedResponse | None:
        """Return the response to a request with a body of `size` bytes; None if the request is answered already."""
        dispatcher = self._dispatcher
        context, cors = dispatcher.contexts.begin(head, self._address), dispatcher.cors
        self._response = response = FramedResponse(
            self,
            self._transport,
            self._server_state,
            context,
            keep_alive,
            chunks_allowed,
            b"" if cors is None else cors.lines(head.headers),
        )
        if cors is not None and (answer := cors.preflight(head.method, head.headers)) is not None:
            self._answer(response, *answer)
            return None
        try:
            context.admit()
            if size > self._limits.max_body_bytes:
                raise too_large(self._limits)
        except RequestError as error:
            self._refuse(response, error)
            return None
        return response

    def _start(self, response: FramedResponse, body: bytes) -> None:
        self._end_arrival()
        self._current = current = self._dispatcher.serve(response.context, response)
        current.start(body)

    def _refuse(self, response: FramedResponse, error: RequestError) -> None:
        self._answer(response, error.status, *response.context.refusal(error))

    def _answer(self, response: FramedResponse, status: int, headers: Headers, body: bytes) -> None:
        if not self._came_whole:
            response.keep_alive = False
        response.begin(ResponseHead(status, headers), None, body, True)

    def response_ended(self) -> None:
        response, came_whole = self._response, self._came_whole
        assert response is not None
        self._answered = True
        self._end_request()
        if self._half_closed and not self._queue:
            self._transport.close()
        elif response.keep_alive:
            self._deadline.set(self._keep_alive_seconds)
            if self._queue is not None or self._intake is _UNREADABLE:
                self._plan_next()
        elif came_whole:
            self._transport.close()
        else:
            self._intake = _LINGERING
            self._deadline.set(_LINGER_SECONDS)
            if self._transport.can_write_eof():  # over TLS nothing can end alone
                self._transport.write_eof()

    def response_switched(self, peer: WebSocketPeer, on_stop: Callable[[], None], on_end: Callable[[], None]) -> None:
        self._response = self._request = self._current = self._queue = None
        self._deadline.close()
        self._reader.close()
        switched = _Switched(peer, on_stop, on_end, self._server_state)
        self._server_state.connections.discard(self)
        self._server_state.connections.add(switched)  # type: ignore[arg-type]
        self._transport.set_protocol(switched)  # type: ignore[arg-type]
        peer.connection_made(self._transport)
        if self._write_paused:
            switched.pause_writing()

    def response_broken_off(self, until_close: bool) -> None:
        if self._response is not None:
            self._end_request()
        # A body that ends with the connection must not seem complete. A client that does not read sees no end.
        if until_close or self._write_paused:
            self._transport.abort()
        else:
            self._transport.close()

    def _end_request(self) -> None:
        self._end_arrival()
        response = self._response
        assert response is not None
        if self._request is not None:
            self._request.body = []
        self._response = self._request = self._current = None
        response.context.end()


class _Switched:
    """A client's connection whose protocol is now WebSocket: a protocol of asyncio's, which the server counts."""

    def __init__(
        self, peer: WebSocketPeer, on_stop: Callable[[], None], on_end: Callable[[], None], state: ServerState
    ) -> None:
        self._peer = peer
        self._on_stop = on_stop
        self._on_end = on_end
        self._server_state = state

    def shutdown(self) -> None:
        """Close the WebSocket. Called when the server stops."""
        self._on_stop()

    def data_received(self, data: bytes) -> None:
        self._peer.data_received(data)

    def eof_received(self) -> bool:
        return self._peer.eof_received()

    def pause_writing(self) -> None:
        self._peer.pause_writing()

    def resume_writing(self) -> None:
        self._peer.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server_state.connections.discard(self)
        self._peer.connection_lost(exc)
        self._on_end()


def _address(name: object) -> ServerAddress | None:
    if isinstance(name, tuple):
        return str(name[0]), int(name[1])
    return (name, None) if isinstance(name, str) else None


def _stopping() -> RequestError:
    return RequestError(
        "The service stops. Send the request again.", status=503, type="service_unavailable", code="stopping"
    )
