"""The fast lane: requests for workers, served inside uvicorn's protocol class, without ASGI between.

A request's head is collected here first. A POST to an endpoint of the workers is the lane's: its body is collected, an
exchange sends it on, and what the worker answers is written to the client as it comes. Any other head, and what wants
another protocol, is told to uvicorn's class as if it had just been read.

              ┌─ not ours ──▶ uvicorn's cycle ──▶ ASGI
    head ─────┤
              └─ ours ──▶ body ──▶ exchange ──▶ answer ──▶ the next request

One request of a connection is served at a time. What is pipelined behind it is kept parsed, and nothing more is read
until its turn comes. Answers are framed here anew, so that nothing but what was understood is ever passed on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import deque
from http import HTTPStatus

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from indexer.errors import RequestError
from kvrouter.http_protocol import HEAD_BYTES, BoundedHttpProtocol
from router.apis.endpoints import BY_LOAD, PROMPTED
from router.forwarding.event_stream import ChunkWriter
from router.forwarding.exchange import Exchange
from router.forwarding.known_head import KnownHead
from router.forwarding.proxy import Entrance, too_large, too_slow
from router.forwarding.request_head import RequestHead
from router.forwarding.visit import Visit
from router.upstream.answer_head import WITHOUT_BODY, AnswerHead
from router.upstream.chunks import body_size
from router.upstream.origin import Headers, lines_of

_PATHS = frozenset(path.encode() for path in (*PROMPTED, *BY_LOAD))
_STATUS_LINES = {each.value: b"HTTP/1.1 %d %b\r\n" % (each.value, each.phrase.encode()) for each in HTTPStatus}
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
# How long the rest of a body that was refused is read, so that its client gets to read the answer.
_LINGER_SECONDS = 5.0
# More than so much is not copied behind a head.
_ONE_BUFFER = 64 * 1024


class _Request:
    """A request as it comes. It can stand in for the parser when uvicorn is told of it."""

    # What a request whose head is known does not change stands here, so that it is not made for each.
    method = b""
    url = b""
    version = ""
    size = 0
    keeps_alive = False
    upgrades = False
    expects = False
    complete = False
    handed_over = False
    head: RequestHead | None = None  # once it is known to be ours

    def __init__(self) -> None:
        self.headers: Headers = []
        self.body: list[bytes] = []

    def told(self) -> None:
        """The head is complete."""
        path = self.url.partition(b"?")[0]
        if self.method == b"POST" and path in _PATHS and not self.upgrades and b"#" not in self.url:
            self.head = RequestHead("POST", path.decode(), self.url, self.headers)

    def get_method(self) -> bytes:
        return self.method

    def get_http_version(self) -> str:
        return self.version

    def should_keep_alive(self) -> bool:
        return self.keeps_alive

    def should_upgrade(self) -> bool:
        return self.upgrades


def _again(head: RequestHead, body: bytes) -> _Request:
    """A request that came at once, over a connection that stays: of a head that is known, and any body."""
    request = _Request()
    request.head = head
    request.version = "1.1"
    request.body = [body]
    request.size = len(body)
    request.keeps_alive = request.complete = True
    return request


class FastLaneProtocol(BoundedHttpProtocol):
    """A client's connection. It is the client of its exchange."""

    def __init__(
        self,
        entrance: Entrance,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._entrance = entrance
        self._reading = _Request()  # what the parser is at
        self._queue: deque[_Request] = deque()
        # The request that is served here, and its answer.
        self._current: _Request | None = None
        self._visit: Visit | None = None
        self._exchange: Exchange | None = None
        self._keeps_alive = True
        self._chunked = self._until_close = self._lingering = False
        self._known: KnownHead[RequestHead] | None = None  # of the last request that came at once
        self._between = True  # the parser is before a request

    def data_received(self, data: bytes) -> None:
        known, begins, last = self._known, self._between, self._reading
        if known is not None and begins and self._expects_a_request and (body := known.read(data)) is not None:
            self._take(_again(known.said, body))
            return
        super().data_received(data)
        request = self._reading
        if begins and request is not last and request.complete and request.keeps_alive and request.head is not None:
            self._known = KnownHead.of(data, request.head.without_length()) or known

    # The parser

    def on_message_begin(self) -> None:
        self._between = False
        self._reading = _Request()
        self._begin_head()

    def on_url(self, url: bytes) -> None:
        self._reading.url += url
        self._count(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value) + 4
        if self._head_bytes > HEAD_BYTES:
            self._count(0)
        if self._reading_head:  # else it is a trailer
            self._reading.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        request = self._reading
        self._end_head(request.url)
        request.method = self.parser.get_method()
        request.version = self.parser.get_http_version()
        request.keeps_alive = self.parser.should_keep_alive() and request.version == "1.1"
        request.expects = any(name == b"expect" and value.lower() == b"100-continue" for name, value in request.headers)
        if not self._takes_more:
            return
        if self._busy or self._queue:
            # Whatever it would upgrade to, it is too late for that: others were before it.
            request.told()
            self._queue.append(request)
            self.flow.pause_reading()
        else:
            request.upgrades = self.parser.should_upgrade()
            request.told()
            self._take(request)

    def on_body(self, body: bytes) -> None:
        request = self._reading
        if request.handed_over:
            super().on_body(body)
        elif request is self._current or request in self._queue:
            request.size += len(body)
            if request.size <= self._entrance.settings.max_body_bytes:
                request.body.append(body)
            elif request is self._current:
                self._refuse(too_large(self._entrance.settings))

    def on_message_complete(self) -> None:
        request = self._reading
        request.complete = self._between = True
        if request.handed_over:
            super().on_message_complete()
        elif request is self._current:
            self._start(request)
        elif self._lingering:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        if self._current is not None and not self._current.complete:
            visit = self._done()
            visit.answered(400, [])
            visit.end()
        if self._lingering:
            self.transport.close()
        else:
            super().send_400_response(msg)

    @property
    def _owes_answers(self) -> bool:
        return self._current is not None or any(request.complete for request in self._queue) or super()._owes_answers

    # Requests in their turn

    @property
    def _busy(self) -> bool:
        return self._current is not None or (self.cycle is not None and not self.cycle.response_complete)

    @property
    def _expects_a_request(self) -> bool:
        """Whether nothing is served, and uvicorn has nothing to do with this connection."""
        return not (self._busy or self._queue or self._lingering or self.cycle) and self._unreadable is None

    @property
    def _takes_more(self) -> bool:
        """Whether another request may follow the last one that came."""
        if self._lingering or self.transport.is_closing():
            return False
        if self._queue:
            return self._queue[-1].keeps_alive
        if self._current is not None:
            return self._keeps_alive
        return self.cycle is None or self.cycle.response_complete or self.cycle.keep_alive

    def _take(self, request: _Request) -> None:
        head = request.head
        if head is None:
            self._hand_over(request)
            return
        self._current = request
        self._chunked = self._until_close = False
        self._keeps_alive = request.keeps_alive
        self._visit = visit = self._entrance.visits.begin(head)
        settings = self._entrance.settings
        try:
            visit.admit()
            size = request.size if request.complete else max(request.size, _length(request.headers))
            if size > settings.max_body_bytes:
                raise too_large(settings)
        except RequestError as error:
            self._refuse(error)
            return
        if request.complete:
            self._start(request)
            return
        if request.expects and not request.body and request.version == "1.1":
            self.transport.write(_CONTINUE)
        self._deadline.set(settings.body_timeout)

    def _start(self, request: _Request) -> None:
        self._deadline.clear()
        assert self._visit is not None
        self._exchange = Exchange(self._entrance.forwarding, self._visit, self)
        body = request.body
        self._exchange.start(body[0] if len(body) == 1 else b"".join(body))

    def _hand_over(self, request: _Request) -> None:
        """Let uvicorn serve a request, of which all came that came so far."""
        request.handed_over = True
        parser, self.parser = self.parser, request  # type: ignore[assignment]
        try:
            HttpToolsProtocol.on_message_begin(self)
            HttpToolsProtocol.on_url(self, request.url)
            for name, value in request.headers:
                HttpToolsProtocol.on_header(self, name, value)
            HttpToolsProtocol.on_headers_complete(self)
            if request.body:
                HttpToolsProtocol.on_body(self, b"".join(request.body))
            if request.complete:
                HttpToolsProtocol.on_message_complete(self)
        finally:
            self.parser = parser

    def _refuse(self, error: RequestError) -> None:
        """Answer a request without sending it anywhere."""
        assert self._visit is not None
        headers, body = self._visit.refusal(error)
        self.begin(AnswerHead(error.status, headers), [], body, True)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._plan_next()

    def _plan_next(self) -> None:
        if self._queue:
            self.loop.call_soon(self._next)
        else:
            self._refuse_the_rest()

    def _next(self) -> None:
        if self._busy or not self._queue or self.transport.is_closing():
            return
        request = self._queue.popleft()
        if self._unreadable is not None and not request.complete:
            self._refuse_the_rest()
            return
        if not self._queue and self._unreadable is None:
            self.flow.resume_reading()
        self._take(request)

    # The answer

    def begin(self, head: AnswerHead, ours: Headers, data: bytes, ended: bool) -> None:
        request, visit, status = self._current, self._visit, head.status
        assert request is not None
        assert visit is not None
        if not request.complete:
            self._keeps_alive = False
        _common.read(self.server_state)
        if _common.closes:
            self._keeps_alive = False
        visit.answered(status, ours)
        lines = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status, _common.lines, head.lines]
        lines.append(lines_of(ours))
        lines.append(b"x-request-id: %b\r\n" % visit.id)
        if head.length:
            lines.append(b"content-length: %b\r\n" % head.length)
        elif status not in WITHOUT_BODY:
            if ended:
                lines.append(b"content-length: %d\r\n" % len(data))
            elif request.version == "1.1":
                lines.append(b"transfer-encoding: chunked\r\n")
                self._chunked = True
            else:
                self._until_close, self._keeps_alive = True, False
        if not self._keeps_alive:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        if data:
            visit.passed(len(data))
            if self._chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
        if len(data) <= _ONE_BUFFER:
            lines.append(data)
            self.transport.write(b"".join(lines))
        else:
            self.transport.write(b"".join(lines))
            self.transport.write(data)
        if ended:
            self._answered()

    def more(self, data: bytes, ended: bool) -> None:
        if data and self._visit is not None and self._visit.logged:
            self._visit.passed(len(data))
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            if ended:
                data += b"0\r\n\r\n"
        if data:
            self.transport.write(data)
        if ended:
            self._answered()

    @property
    def chunks(self) -> ChunkWriter | None:
        if not self._chunked or self._visit is None:
            return None
        return _LoggedChunks(self.transport, self._visit) if self._visit.logged else self.transport

    def break_off(self) -> None:
        if self._visit is not None:
            self._done().end()
        # A body that ends with the connection must not seem to be whole; and who does not read would never see its end.
        if self._until_close or self.flow.write_paused:
            self.transport.abort()
        else:
            self.transport.close()

    def _answered(self) -> None:
        request = self._current
        assert request is not None
        self._done().end()
        self.server_state.total_requests += 1
        if self._keeps_alive:
            self._deadline.set(self.timeout_keep_alive)
            self._plan_next()
        elif request.complete:
            self.transport.close()
        else:
            self._lingering = True
            self._deadline.set(_LINGER_SECONDS)

    def _done(self) -> Visit:
        """Nothing is served any more."""
        visit = self._visit
        assert visit is not None
        self._current = self._visit = self._exchange = None
        return visit

    # The connection

    def connection_lost(self, exc: Exception | None) -> None:
        exchange = self._exchange
        if self._current is not None:
            if exchange is not None:
                exchange.client_left()
            else:
                self._entrance.forwarding.metrics.abandoned.inc()
            self._done().end()
        self._queue.clear()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._exchange is not None:
            self._exchange.resume()

    def shutdown(self) -> None:
        if self._current is not None:
            self._keeps_alive = False
            self._queue.clear()
        else:
            super().shutdown()

    def _late(self) -> None:
        if self._current is not None and not self._current.complete:
            self._refuse(too_slow(self._entrance.settings))
        else:
            super()._late()


class _LoggedChunks:
    """Counts what is written for the line in the log."""

    def __init__(self, transport: asyncio.Transport, visit: Visit) -> None:
        self._transport = transport
        self._visit = visit

    def write(self, data: bytes) -> None:
        self._visit.passed(body_size(data))
        self._transport.write(data)


def _length(headers: Headers) -> int:
    for name, value in headers:
        if name == b"content-length":
            return int(value)
    return 0


class _Common:
    """The headers of every answer (the date, which changes each second), and whether connections are to be closed."""

    headers: list[tuple[bytes, bytes]] | None = None
    lines = b""
    closes = False

    def read(self, state: ServerState) -> None:
        """Take note of what changed."""
        if state.default_headers is not self.headers:
            self.headers = state.default_headers
            self.lines = lines_of([header for header in self.headers if header[0] != b"connection"])
            self.closes = (b"connection", b"close") in self.headers


_common = _Common()


# What is used of uvicorn's class, and how it is called.
_METHODS = {
    "connection_made": ["self", "transport"],
    "connection_lost": ["self", "exc"],
    "data_received": ["self", "data"],
    "on_message_begin": ["self"],
    "on_url": ["self", "url"],
    "on_header": ["self", "name", "value"],
    "on_headers_complete": ["self"],
    "on_body": ["self", "body"],
    "on_message_complete": ["self"],
    "on_response_complete": ["self"],
    "send_400_response": ["self", "msg"],
    "shutdown": ["self"],
    "pause_writing": ["self"],
    "resume_writing": ["self"],
}
_ATTRIBUTES = {"parser", "loop", "transport", "flow", "cycle", "server_state", "timeout_keep_alive"}


def uvicorn_fits(protocol: type = HttpToolsProtocol, cycle: type = RequestResponseCycle) -> bool:
    """Whether uvicorn's classes are as this module knows them."""
    for name, parameters in _METHODS.items():
        method = getattr(protocol, name, None)
        if method is None or list(inspect.signature(method).parameters) != parameters:
            return False
    known, known_of_cycle = _names_in_init(protocol), _names_in_init(cycle)
    return known >= _ATTRIBUTES and known_of_cycle >= {"response_complete", "keep_alive"}


def _names_in_init(kind: type) -> set[str]:
    return set(inspect.getattr_static(kind, "__init__").__code__.co_names)
