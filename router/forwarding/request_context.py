"""What every request has, whichever way it comes in: its id, its trace, its tenant, and its line in the log.

`RequestContexts` begins one; `ContextMiddleware` does so for ASGI, around the whole application.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from structlog.contextvars import bound_contextvars

from indexer.errors import RequestError, error_headers
from router.access import AccessControl, Tenant, without_credentials
from router.apis.endpoints import call_error_body
from router.forwarding.request_head import RequestHead
from router.http.headers import Headers
from router.http.request_id import new_id, with_id
from router.telemetry.access_log import AccessLine
from router.telemetry.metrics import RequestMetrics
from router.telemetry.spans import RequestTrace, Tracing

_CONTEXT = "kvrouter.request_context"


class RequestContext:
    """One request, from its head to the end of its answer. `logged`: it gets a line in the log. `trace`: None where
    nothing is traced."""

    __slots__ = ("_access", "_line", "_metrics", "head", "id", "logged", "tenant", "trace")

    def __init__(
        self,
        head: RequestHead,
        trace: RequestTrace | None,
        line: AccessLine | None,
        access: AccessControl | None,
        metrics: RequestMetrics,
    ) -> None:
        self.head = head
        self.id = head.id or new_id()
        self.trace = trace
        self.tenant: Tenant | None = None
        self.logged = line is not None
        self._line = line
        self._access = access
        self._metrics = metrics

    def admit(self) -> None:
        """Find out the tenant. Raises RequestError (401, 403) when the request is not allowed."""
        if self._access is not None:
            self.tenant = self._access.check(self.head.path, self.head.headers)

    def refusal(self, error: RequestError) -> tuple[Headers, bytes]:
        """The headers and the body of an answer that refuses the request, which is counted."""
        body = call_error_body(self.head.path, error)
        headers = error_headers(error, body)
        if error.status == 401 or error.code == "not_allowed":
            headers.append((b"www-authenticate", b"Bearer"))
        self._metrics.refused.labels(str(error.status)).inc()
        return headers, body

    @property
    def headers(self) -> Headers:
        """The request's headers, with its id; names are in lower case."""
        return self.head.with_id(self.id)

    def headers_for_workers(self) -> Headers:
        """The same, without the key when it was meant for us."""
        return self.headers if self._access is None else without_credentials(self.headers)

    def lines_for_workers(self) -> bytes:
        """Those of them that are about the message, as they are sent, but for the id."""
        return self.head.lines(self._access is None)

    def answered(self, status: int, headers: Headers) -> None:
        """The head of the answer is sent, with these headers of ours."""
        if self.tenant is not None:
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

    `access`: None where anyone may pass; `tracing`: None where nothing is traced; `log`: whether requests are logged.
    """

    def __init__(
        self, access: AccessControl | None, tracing: Tracing | None, metrics: RequestMetrics, log: bool
    ) -> None:
        self._access = access
        self._tracing = tracing
        self._metrics = metrics
        self._log = log

    def begin(self, head: RequestHead) -> RequestContext:
        """A request came."""
        trace = None if self._tracing is None else self._tracing.request(head.method, head.path, head.headers)
        line = AccessLine(head.method, head.path) if self._log else None
        return RequestContext(head, trace, line, self._access, self._metrics)


class ContextMiddleware:
    """Gives each request to `app` a context."""

    def __init__(self, app: ASGIApp, contexts: RequestContexts) -> None:
        self._app = app
        self._contexts = contexts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        context = self._contexts.begin(RequestHead(scope["method"], scope["path"], target, scope["headers"]))

        async def observed_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = _lowered(message.get("headers", ()))
                context.answered(message["status"], headers)
                message = {**message, "headers": with_id(headers, context.id)}
            else:
                context.passed(len(message.get("body", b"")))
            await send(message)

        with context.logging():
            try:
                await self._pass({**scope, "headers": context.headers, _CONTEXT: context}, receive, observed_send)
            finally:
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
        await self._app(scope, receive, send)


def _lowered(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    return [(name.lower(), value) for name, value in headers]


def context_of(scope: Scope) -> RequestContext:
    """The context of a request to an application."""
    context: RequestContext = scope[_CONTEXT]
    return context
