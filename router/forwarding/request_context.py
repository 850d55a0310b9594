"""What every request has, whichever way it comes in: its id, its trace, its tenant, and its line in the log.

`RequestContexts` begins one; `ContextMiddleware` does so for ASGI, around the whole application.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from http_api.errors import RequestError, error_headers
from router.apis.endpoints import call_error_body
from router.auth import Admitted, ArrivingBody, BodyCheck, Door, Tenant
from router.forwarding.request_head import RequestHead
from router.http.headers import Headers
from router.http.request_id import new_id, with_id
from router.observability.access_log import AccessLine
from router.observability.metrics import RequestMetrics
from router.observability.spans import RequestTrace, Tracing
from router.settings import ServerSettings

_CONTEXT = "kvrouter.request_context"


class RequestContext:
    """One request, from its head to the end of its answer. `logged`: it gets a line in the log. `trace`: None where
    nothing is traced."""

    __slots__ = ("_door", "_line", "_metrics", "_port", "head", "id", "logged", "tenant", "trace")

    def __init__(
        self,
        head: RequestHead,
        trace: RequestTrace | None,
        line: AccessLine | None,
        door: Door,
        metrics: RequestMetrics | None,
        port: int | None = None,
    ) -> None:
        self.head = head
        self.id = head.id or new_id()
        self.trace = trace
        self.tenant: Tenant | None = None
        self.logged = line is not None
        self._line = line
        self._door = door
        self._port = port
        self._metrics = metrics

    def admit(self) -> None:
        """Raise RequestError (400, 401, 403, …) for a head that is not accepted, and when whoever asks may not."""
        head = self.head
        admitted = head.admitted
        if admitted is None:
            admitted = head.admitted = self._door.admit(head.method, head.target, head.headers, self._port)
        self.tenant = admitted.tenant

    @property
    def admitted(self) -> Admitted:
        """What is asked for and by whom, once that was checked."""
        admitted = self.head.admitted
        assert admitted is not None
        return admitted

    def checked(self, body: bytes) -> tuple[bytes, bytes]:
        """The body to read and to send on, and what to read of it where its prompt does not count.

        Raises RequestError (400, 413).
        """
        return self._door.body(self.admitted, body)

    @property
    def bodies(self) -> BodyCheck:
        """How bodies are checked."""
        return self._door.bodies

    def refusal(self, error: RequestError) -> tuple[Headers, bytes]:
        """The headers and the body of an answer that refuses the request.

        That is counted, but for what is wrong with a request that was let in and that the service answers itself.
        """
        body = call_error_body(self.head.path, error)
        headers = error_headers(error, body)
        if error.status == 401 or error.code == "not_allowed":
            headers.append((b"www-authenticate", b"Bearer"))
        if self._metrics is not None and not self._is_own:
            self._metrics.refused.labels(str(error.status)).inc()
        return headers, body

    @property
    def _is_own(self) -> bool:
        """Whether it was let in, and the service answers it itself."""
        admitted = self.head.admitted
        return admitted is not None and admitted.route.own

    def abandoned(self) -> None:
        """The client left before all of its request came."""
        if self._metrics is not None and not self._is_own:
            self._metrics.abandoned.inc()

    @property
    def headers(self) -> Headers:
        """The request's headers, with its id; names are in lower case."""
        return self.head.with_id(self.id)

    def headers_for_workers(self) -> Headers:
        """The same, without what is for the router alone to read or to say."""
        return self._door.headers_for_workers(self.admitted, self.headers)

    def lines_for_workers(self) -> bytes:
        """Those of them that are about the message, as they are sent, but for the id."""
        lines = self.head.lines
        if lines is None:
            lines = self.head.make_lines(self.headers_for_workers())
        return lines

    def answered(self, status: int, headers: Headers) -> None:
        """The head of the answer is sent, with these headers of ours."""
        if self.tenant is not None and self._metrics is not None:
            self._metrics.of_tenant.labels(self.tenant.name, str(status)).inc()
        if self.trace is not None:
            self.trace.set(http_response_status_code=status)
        if self._line is not None:
            self._line.head(status, headers)

    def passed(self, size: int) -> None:
        """Bytes of the answer's body are sent: their number."""
        if self._line is not None:
            self._line.passed(size)

    def end(self) -> None:
        """The request is over, however it ended."""
        if self._line is not None:
            self._line.write(**self._names())
        if self.trace is not None:
            self.trace.end()

    def logging(self) -> AbstractContextManager[object]:
        """What is logged meanwhile has the request's id."""
        return bound_contextvars(**self._names())

    def _names(self) -> dict[str, str]:
        names = {"request_id": self.id.decode()}
        return names | {"trace_id": self.trace.id} if self.trace is not None else names


class RequestContexts:
    """Begins contexts.

    `door`: what each of them passes; `tracing`, `metrics`: None where nothing is traced, or counted; `log`: whether
    requests are logged.
    """

    def __init__(self, door: Door, tracing: Tracing | None, metrics: RequestMetrics | None, log: bool) -> None:
        self.door = door
        self._tracing = tracing
        self._metrics = metrics
        self._log = log

    def begin(self, head: RequestHead, port: int | None = None) -> RequestContext:
        """A request came, to this port where that matters."""
        trace = None if self._tracing is None else self._tracing.request(head.method, head.path, head.headers)
        line = AccessLine(head.method, head.path) if self._log else None
        return RequestContext(head, trace, line, self.door, self._metrics, port)


class ContextMiddleware:
    """Gives each request to `app` a context, and its body bounds."""

    def __init__(self, app: ASGIApp, contexts: RequestContexts, settings: ServerSettings) -> None:
        self._app = app
        self._contexts = contexts
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        head = RequestHead(scope["method"], scope["path"], target, scope["headers"])
        context = self._contexts.begin(head, scope["server"][1] if scope.get("server") else None)
        body = ArrivingBody(receive, scope["headers"], self._settings, self._contexts.door.arrivals)

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = _lowered(message.get("headers", ()))
                context.answered(message["status"], headers)
                headers = with_id(headers, context.id)
                if not body.complete:  # nobody reads the rest
                    headers.append((b"connection", b"close"))
                message = {**message, "headers": headers}
            else:
                context.passed(len(message.get("body", b"")))
            await send(message)

        with context.logging():
            try:
                await self._pass({**scope, "headers": context.headers, _CONTEXT: context}, body, observed_send)
            finally:
                body.end()
                context.end()

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            context.admit()
        except RequestError as error:
            headers, body = context.refusal(error)
            await send({"type": "http.response.start", "status": error.status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        if context.admitted.route.own:
            receive = self._contexts.door.whole(receive, scope["method"])
            if scope["method"] == "HEAD":
                scope["method"] = "GET"  # the server leaves out the body
        with suppress(ClientDisconnect):
            await self._app(scope, receive, send)


def _lowered(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name.lower(), value) for name, value in headers]


def context_of(scope: Scope) -> RequestContext:
    """The context of a request to an application."""
    context: RequestContext = scope[_CONTEXT]
    return context
