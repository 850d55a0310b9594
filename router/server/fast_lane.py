"""The fast lane: requests for workers, served where they arrive, without ASGI between.

A connection's requests are read here. A POST to an endpoint of the workers is the lane's: its body is collected, an
exchange sends it on, and what the worker answers is written to the client as it comes. Any other request, and what
wants another protocol, uvicorn's class is told of, which is made when there is one.

              ┌─ not ours ──▶ uvicorn's cycle ──▶ ASGI
    head ─────┤
              └─ ours ──▶ body ──▶ exchange ──▶ answer ──▶ the next request

One request of a connection is served at a time. What is pipelined behind it is kept parsed, and nothing more is read
until its turn comes. Answers are framed here anew, so that nothing but what was understood is ever passed on.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from typing import Any, Final

import httptools
from uvicorn.config import Config
from uvicorn.server import ServerState

from indexer.errors import RequestError
from router.access import too_large, too_slow
from router.apis.endpoints import BY_LOAD, PROMPTED
from router.forwarding.event_stream import ChunkWriter
from router.forwarding.proxied_request import ProxiedRequest
from router.forwarding.proxy import ProxyContext
from router.forwarding.request_context import RequestContext
from router.forwarding.request_head import RequestHead
from router.forwarding.response_writer import ResponseWriter
from router.forwarding.routing_headers import RoutingHeaders
from router.http.cached_head import CachedHead, RecentHeads
from router.http.chunks import body_size
from router.http.deadline import Deadline
from router.http.headers import Headers, lines_of
from router.http.response_head import WITHOUT_BODY, ResponseHead
from router.http.strict_head import head_problem
from router.server import http_protocol
from router.server.asgi_fallback import AsgiFallback, ParsedRequest
from router.server.half_closed import probe
from router.server.http_protocol import HEAD_BYTES, RefusedRequestError

_PATHS: Final = frozenset(path.encode() for path in (*PROMPTED, *BY_LOAD))
_STATUS_LINES: Final = {each.value: b"HTTP/1.1 %d %b\r\n" % (each.value, each.phrase.encode()) for each in HTTPStatus}
_OK: Final = 200
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
# How long the rest of a body that was refused is read, so that its client gets to read the answer.
_LINGER_SECONDS: Final = 5.0
# More than so much is not copied behind a head.
_ONE_BUFFER: Final = 64 * 1024

_log = logging.getLogger("uvicorn.error")


class _Request:
    """A request as the parser reads it."""

    __slots__ = (
        "body",
        "complete",
        "expects",
        "handed_over",
        "head",
        "headers",
        "keeps_alive",
        "method",
        "size",
        "upgrades",
        "url",
        "version",
    )

    def __init__(self) -> None:
        self.method = b""
        self.url = b""
        self.version = ""
        self.headers: Headers = []
        self.body: list[bytes] = []
        self.size = 0
        self.keeps_alive = False
        self.upgrades = False
        self.expects = False
        self.complete = False
        self.handed_over = False
        self.head: RequestHead | None = None  # once it is known to be ours

    def told(self) -> None:
        """The head is complete."""
        path = self.url.partition(b"?")[0]
        if self.method == b"POST" and path in _PATHS and not self.upgrades:
            self.head = RequestHead("POST", path.decode(), self.url, self.headers)

    def length(self) -> int:
        """How long its body is said to be; 0 when that is not said."""
        for name, value in self.headers:
            if name == b"content-length":
                return int(value)
        return 0


class FastLaneProtocol(ResponseWriter):
    """A client's connection, as asyncio's protocols are and as uvicorn keeps them. It is the client of its exchange."""

    def __init__(
        self,
        proxy_context: ProxyContext,
        recent: RecentHeads[RequestHead],
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """`recent`: the heads that other connections' requests had."""
        self._proxy_context = proxy_context
        self._recent = recent
        self._config = config
        self._server_state = server_state
        self._app_state = app_state
        self._loop = _loop or asyncio.get_event_loop()
        self._keep_alive_seconds = float(config.timeout_keep_alive)
        self._transport: asyncio.Transport = None  # type: ignore[assignment]
        self._write_paused = False
        self._deadline = Deadline(self._loop, self._late)
        # What is read. The parser is made for what is not known.
        self._known: CachedHead[RequestHead] | None = None  # of the last request that came at once
        self._parser: httptools.HttpRequestParser | None = None
        self._reading: _Request | None = None  # what the parser is at
        self._between = True  # it is before a request
        self._reading_head = True
        self._head_bytes = 0
        self._unreadable: str | None = None  # why what follows cannot be read
        self._queue: deque[_Request] | None = None  # made for the first that has to wait
        self._ordinary: AsgiFallback | None = None  # made for the first request that is not ours
        # The request that is served here, and its answer.
        self._context: RequestContext | None = None
        self._current: _Request | None = None  # where the parser has read it
        self._proxied: ProxiedRequest | None = None
        self._whole = False  # all of it came
        self._chunks_allowed = False  # it is of HTTP/1.1
        self._keeps_alive = True
        self._chunked = self._until_close = self._lingering = False
        self._begun = False  # its answer
        self._half_closed = False  # nothing more comes
        self._arriving = 0  # bytes of its body, while it is not complete

    # The connection

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._server_state.connections.add(self)  # type: ignore[arg-type]  # it has what uvicorn asks of them
        self._deadline.set(http_protocol.HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        proxied = self._proxied
        if self._context is not None:
            if proxied is not None:
                proxied.client_left()
            else:
                self._proxy_context.services.metrics.abandoned.inc()
            self._done().end()
        self._queue = None
        self.left()
        if self._ordinary is not None:
            self._ordinary.connection_lost(exc)
            self._ordinary = None
        if exc is None:
            self._transport.close()
        self._parser = None  # which knows this connection

    def left(self) -> None:
        """The connection is not ours any more."""
        self._deadline.close()
        self._server_state.connections.discard(self)

    def eof_received(self) -> bool:
        """Nothing more comes. A client that half-closed gets what it asked for; else the connection is closed."""
        if not self._owes_answers:
            return False
        ordinary = self._ordinary
        self._half_closed = True
        return probe(self._loop, self._transport, self._begun or (ordinary is not None and ordinary.answering))

    def pause_writing(self) -> None:
        self._write_paused = True
        if self._ordinary is not None:
            self._ordinary.pause_writing()
        if self._proxied is not None:
            self._proxied.pause()

    def resume_writing(self) -> None:
        self._write_paused = False
        if self._ordinary is not None:
            self._ordinary.resume_writing()
        if self._proxied is not None:
            self._proxied.resume()

    def shutdown(self) -> None:
        """The server stops: the connection is closed when its request is answered."""
        if self._context is not None and not self._whole:
            self._refuse(_stopping())  # who knows when the rest comes
            self._transport.close()
        elif self._context is not None:
            self._keeps_alive = False
            self._queue = None
        elif self._ordinary is not None:
            self._ordinary.shutdown()
        else:
            self._transport.close()

    def _late(self) -> None:
        if self._context is not None and not self._whole:
            self._refuse(too_slow(self._proxy_context.settings))
        else:
            self._transport.close()

    # What comes

    def data_received(self, data: bytes) -> None:
        if self._between and self._expects_a_request:
            known = self._known
            if known is not None and (body := known.read(data)) is not None:
                self._take_known(known.said, body)
                return
            read = self._recent.read(data)
            if read is not None:
                self._known, body = read
                self._take_known(self._known.said, body)
                return
        self._parse(data)

    def _parse(self, data: bytes) -> None:
        begins, last, before = self._between, self._reading, self._head_bytes
        parser = self._parser
        if parser is None:
            parser = self._parser = httptools.HttpRequestParser(self)
            # Answer a request although more follows it that it said would not: uvicorn does.
            parser.set_dangerous_leniencies(lenient_data_after_close=True)
        try:
            parser.feed_data(data)
        except httptools.HttpParserError:
            _log.warning("Invalid HTTP request received.")
            self._refuse_the_rest("Invalid HTTP request received.")
        except httptools.HttpParserUpgrade:
            if self._ordinary is not None and self._reading is not None and self._reading.handed_over:
                self._ordinary.upgrade()
        if self._transport.is_closing():
            return
        if self._reading_head:
            # The parser keeps a header to itself until it is complete.
            self._head_bytes = before + len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse_the_rest("Request header fields too large.")
            return
        request = self._reading
        if (
            begins
            and request is not None
            and request is not last
            and request.complete
            and request.keeps_alive
            and request.head is not None
        ):
            known = CachedHead.of(data, request.head.without_length())
            if known is not None:
                self._known = self._recent.add(known)

    def on_message_begin(self) -> None:
        self._between = False
        self._reading = _Request()
        if not self._reading_head:
            self._reading_head = True
            self._deadline.set(http_protocol.HEAD_SECONDS)
        self._head_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._read.url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._reading_head:  # else it is a trailer
            self._read.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        request, parser = self._read, self._parser
        assert parser is not None
        self._reading_head = False
        self._deadline.clear()
        request.method = parser.get_method()
        request.version = parser.get_http_version()
        if problem := head_problem(request.url, request.version, request.headers):
            raise RefusedRequestError(problem)
        request.keeps_alive = parser.should_keep_alive() and request.version == "1.1"
        request.expects = any(name == b"expect" and value.lower() == b"100-continue" for name, value in request.headers)
        if not self._takes_more:
            return
        if self._busy or self._queue:
            # Whatever it would upgrade to, it is too late for that: others were before it.
            request.told()
            if self._queue is None:
                self._queue = deque()
            self._queue.append(request)
            self._transport.pause_reading()
        else:
            request.upgrades = parser.should_upgrade()
            request.told()
            self._take(request)

    def on_body(self, body: bytes) -> None:
        request = self._read
        if request.handed_over:
            if self._ordinary is not None:
                self._ordinary.on_body(body)
        elif request is self._current or (self._queue is not None and request in self._queue):
            if request is self._current and not self._arrives(len(body)):
                return
            request.size += len(body)
            if request.size <= self._proxy_context.settings.max_body_bytes:
                request.body.append(body)
            elif request is self._current:
                self._refuse(too_large(self._proxy_context.settings))

    def _arrives(self, size: int) -> bool:
        """Whether there is room for so many more bytes of the body; if not, the request is refused."""
        try:
            self._proxy_context.contexts.door.arrivals.add(self._arriving, size)
        except RequestError as error:
            self._refuse(error)
            return False
        self._arriving += size
        return True

    def _arrived(self) -> None:
        """No more of the body is waited for."""
        if self._arriving:
            self._proxy_context.contexts.door.arrivals.end(self._arriving)
            self._arriving = 0

    def on_message_complete(self) -> None:
        request = self._read
        request.complete = self._between = True
        if request.handed_over:
            if self._ordinary is not None:
                self._ordinary.on_message_complete()
        elif request is self._current:
            self._start(request)
        elif self._lingering:
            self._transport.close()

    @property
    def _read(self) -> _Request:
        assert self._reading is not None
        return self._reading

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES:
            raise RefusedRequestError("the head is too large")  # httptools makes a parser's error of it: 400

    # What cannot be read

    def _refuse_the_rest(self, problem: str) -> None:
        """Say that what comes cannot be read, once all before it is answered."""
        if self._context is not None and not self._whole:
            context = self._done()
            context.answered(400, [])
            context.end()
        if self._lingering:
            self._transport.close()
        elif self._owes_answers:
            self._unreadable = problem
            self._transport.pause_reading()
        else:
            self._say_unreadable(problem)

    def _say_unreadable(self, problem: str) -> None:
        lines = lines_of(self._server_state.default_headers)
        self._transport.write(
            b"HTTP/1.1 400 Bad Request\r\n%bcontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (lines, len(problem), problem.encode("ascii"))
        )
        self._transport.close()

    @property
    def _owes_answers(self) -> bool:
        """Whether a request that came whole is not answered yet."""
        if self._context is not None or (self._ordinary is not None and self._ordinary.owes_answer):
            return True
        return self._queue is not None and any(request.complete for request in self._queue)

    # Requests in their turn

    @property
    def _busy(self) -> bool:
        return self._context is not None or (self._ordinary is not None and self._ordinary.busy)

    @property
    def _expects_a_request(self) -> bool:
        """Whether nothing is served, and uvicorn has nothing to do with this connection."""
        return (
            self._context is None
            and not self._queue
            and not self._lingering
            and self._ordinary is None
            and self._unreadable is None
        )

    @property
    def _takes_more(self) -> bool:
        """Whether another request may follow the last one that came."""
        if self._lingering or self._transport.is_closing():
            return False
        if self._queue:
            return self._queue[-1].keeps_alive
        if self._context is not None:
            return self._keeps_alive
        return self._ordinary is None or self._ordinary.keeps_alive

    def _take_known(self, head: RequestHead, body: bytes) -> None:
        """Serve a request that came at once, over a connection that stays: of a head that is known, and any body."""
        self._reading_head = False
        self._keeps_alive = self._chunks_allowed = self._whole = True
        self._chunked = self._until_close = self._begun = False
        self._context = context = self._proxy_context.contexts.begin(head)
        try:
            context.admit()
            if len(body) > self._proxy_context.settings.max_body_bytes:
                raise too_large(self._proxy_context.settings)
        except RequestError as error:
            self._refuse(error)
            return
        self._proxy(context, body)

    def _take(self, request: _Request) -> None:
        head = request.head
        if head is None:
            self._hand_over(request)
            return
        self._current = request
        self._whole = request.complete
        self._chunks_allowed = request.version == "1.1"
        self._chunked = self._until_close = self._begun = False
        self._keeps_alive = request.keeps_alive
        self._context = context = self._proxy_context.contexts.begin(head)
        settings = self._proxy_context.settings
        try:
            context.admit()
            size = request.size if request.complete else max(request.size, request.length())
            if size > settings.max_body_bytes:
                raise too_large(settings)
        except RequestError as error:
            self._refuse(error)
            return
        if request.complete:
            self._start(request)
            return
        if request.expects and not request.body and request.version == "1.1":
            self._transport.write(_CONTINUE)
        self._deadline.set(settings.body_timeout)

    def _start(self, request: _Request) -> None:
        assert self._context is not None
        self._whole = True
        self._arrived()
        body = request.body
        self._proxy(self._context, body[0] if len(body) == 1 else b"".join(body))

    def _proxy(self, context: RequestContext, body: bytes) -> None:
        self._deadline.clear()
        self._proxied = proxied = ProxiedRequest(self._proxy_context.services, context, self)
        proxied.start(body)

    def _hand_over(self, request: _Request) -> None:
        """Let uvicorn serve a request, of which all came that came so far."""
        request.handed_over = True
        ordinary = self._ordinary
        if ordinary is None:
            ordinary = self._ordinary = AsgiFallback(
                self, self._transport, self._config, self._server_state, self._app_state, self._loop
            )
            if self._write_paused:
                ordinary.pause_writing()
        told = ParsedRequest(request.method, request.version, request.keeps_alive, request.upgrades)
        ordinary.take(told, request.url, request.headers)
        if request.body:
            ordinary.on_body(b"".join(request.body))
        if request.complete:
            ordinary.on_message_complete()

    def ordinary_answered(self) -> None:
        """uvicorn's class has answered."""
        if self._half_closed and not self._queue:
            self._transport.close()
        if not self._transport.is_closing():
            self._deadline.set(self._keep_alive_seconds)
        self._plan_next()

    def _refuse(self, error: RequestError) -> None:
        """Answer a request without sending it anywhere."""
        assert self._context is not None
        headers, body = self._context.refusal(error)
        self.begin(ResponseHead(error.status, headers), None, body, True)

    def _plan_next(self) -> None:
        if self._queue:
            self._loop.call_soon(self._next)
        elif self._unreadable is not None and not self._owes_answers and not self._transport.is_closing():
            self._say_unreadable(self._unreadable)

    def _next(self) -> None:
        queue = self._queue
        if self._busy or not queue or self._transport.is_closing():
            return
        request = queue.popleft()
        if self._unreadable is not None and not request.complete:
            if not self._owes_answers:
                self._say_unreadable(self._unreadable)
            return
        if not queue and self._unreadable is None:
            self._transport.resume_reading()
        self._take(request)

    # The answer

    def begin(self, head: ResponseHead, ours: RoutingHeaders | None, data: bytes, ended: bool) -> None:
        context, status = self._context, head.status
        assert context is not None
        self._begun = True
        if not self._whole:
            self._keeps_alive = False
        before = _common.before(self._server_state, status)
        if _common.closes:
            self._keeps_alive = False
        context.answered(status, ours.headers() if ours is not None and context.logged else [])
        beginning = head.beginning(before)
        said = ours.lines() if ours is not None else b""
        if data and context.logged:
            context.passed(len(data))
        size = len(data)
        if ended and not head.length and self._keeps_alive and size <= _ONE_BUFFER and status == _OK:
            # As nearly all are.
            length = str(size).encode()
            self._transport.write(
                b"%b%bx-request-id: %b\r\ncontent-length: %b\r\n\r\n%b" % (beginning, said, context.id, length, data)
            )
            self._answered()
            return
        lines = [beginning, said, b"x-request-id: ", context.id, b"\r\n"]
        if head.length:
            lines.append(b"content-length: %b\r\n" % head.length)
        elif status not in WITHOUT_BODY:
            if ended:
                lines.append(b"content-length: %d\r\n" % size)
            elif self._chunks_allowed:
                lines.append(b"transfer-encoding: chunked\r\n")
                self._chunked = True
            else:
                self._until_close, self._keeps_alive = True, False
        if not self._keeps_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        if data and self._chunked:
            data = b"%x\r\n%b\r\n" % (size, data)
        if size <= _ONE_BUFFER:
            lines.append(data)
            self._transport.write(b"".join(lines))
        else:
            self._transport.write(b"".join(lines))
            self._transport.write(data)
        if ended:
            self._answered()

    def more(self, data: bytes, ended: bool) -> None:
        if data and self._context is not None and self._context.logged:
            self._context.passed(len(data))
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            if ended:
                data += b"0\r\n\r\n"
        if data:
            self._transport.write(data)
        if ended:
            self._answered()

    def chunks(self) -> ChunkWriter | None:
        if not self._chunked or self._context is None:
            return None
        return _LoggedChunks(self._transport, self._context) if self._context.logged else self._transport

    def break_off(self) -> None:
        if self._context is not None:
            self._done().end()
        # A body that ends with the connection must not seem to be whole; and who does not read would never see its end.
        if self._until_close or self._write_paused:
            self._transport.abort()
        else:
            self._transport.close()

    def _answered(self) -> None:
        self._done().end()
        if self._half_closed and not self._queue:
            self._transport.close()
        elif self._keeps_alive:
            self._deadline.set(self._keep_alive_seconds)
            if self._queue is not None or self._unreadable is not None:
                self._plan_next()
        elif self._whole:
            self._transport.close()
        else:
            self._lingering = True
            self._deadline.set(_LINGER_SECONDS)

    def _done(self) -> RequestContext:
        """Nothing is served any more."""
        self._arrived()
        context = self._context
        assert context is not None
        self._context = self._current = self._proxied = None
        return context


def _stopping() -> RequestError:
    return RequestError(
        "The service stops. Send the request again.", status=503, type="service_unavailable", code="stopping"
    )


class _LoggedChunks:
    """Counts what is written for the line in the log."""

    __slots__ = ("_context", "_transport")

    def __init__(self, transport: asyncio.Transport, context: RequestContext) -> None:
        self._transport = transport
        self._context = context

    def write(self, data: bytes) -> None:
        self._context.passed(body_size(data))
        self._transport.write(data)


class _Common:
    """What all answers begin with: the status line, the date, which changes each second, and other headers of all.

    `closes`: whether connections are to be closed.
    """

    __slots__ = ("_before", "_headers", "_lines", "closes")

    def __init__(self) -> None:
        self._headers: Headers | None = None
        self._lines = b""
        self._before: dict[int, bytes] = {}
        self.closes = False

    def before(self, state: ServerState, status: int) -> bytes:
        """What an answer of this status begins with: the same bytes as long as nothing changes."""
        if state.default_headers is not self._headers:
            self._headers = headers = state.default_headers
            self._lines = lines_of([header for header in headers if header[0] != b"connection"])
            self._before = {}
            self.closes = (b"connection", b"close") in headers
        known = self._before.get(status)
        if known is None:
            line = _STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
            known = self._before[status] = line + self._lines
        return known


_common: Final = _Common()
