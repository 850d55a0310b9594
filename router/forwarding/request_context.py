"""The context of a request: its head, its id, its trace, its tenant, and its line in the access log."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Any, Final, TypeAlias

from starlette.types import Scope
from structlog.contextvars import bound_contextvars

from http_api.errors import RequestError, error_headers
from router.admission.ticket import urgent
from router.apis.endpoints import call_error_body
from router.apis.identities import identity_headers
from router.apis.requests import UsualChat
from router.apis.response_owners import is_about_stored
from router.auth import PROCESS_SOCKET, Admitted, AuthGate, BodyCheck, Tenant
from router.auth.tenants import credential
from router.forwarding.client_routing import correlation_id
from router.hooks.hooks import Hooks
from router.hooks.interface import Request as HookRequest
from router.http.headers import LENGTH, REQUEST_ID, Headers, forwarded_lines, given_id, new_id, with_id
from router.observability.access_log import AccessLine
from router.observability.metrics import RequestMetrics
from router.observability.spans import RequestTrace, Tracing

_EXPLAIN = (b"x-kvrouter-explain", b"1")
# The key of a request's context in its ASGI scope.
CONTEXT: Final = "kvrouter.request_context"
# The address that received a request: a host and a port, or the path of a Unix socket and None.
ServerAddress: TypeAlias = tuple[str, int | None]


class RequestHead:
    """A request's head. It is shared by all requests of a connection with an equal head.

    - `path`, `target`: the path without and with its query.
    - `urgency`: the headers that a ticket is made of.
    - `admitted`: the result of the auth gate; None before its check.
    - `identity_headers`: the headers that may name the caller; None before they are read.
    - `lines`: the encoded headers for workers without the id; None before they are made.
    """

    __slots__ = (
        "about_stored",
        "admitted",
        "headers",
        "id",
        "identity_headers",
        "lines",
        "method",
        "path",
        "target",
        "urgency",
        "wants_explanation",
    )

    def __init__(self, method: str, path: str, target: bytes, headers: Headers) -> None:
        self.method = method
        self.path = path
        self.target = target
        self.headers = headers
        self.id = given_id(headers)
        self.urgency = urgent(headers)
        self.identity_headers: Headers | None = None
        self.wants_explanation = _EXPLAIN in headers
        self.about_stored = is_about_stored(path)
        self.admitted: Admitted | None = None
        self.lines: bytes | None = None

    def with_id(self, request_id: bytes) -> Headers:
        """Return the headers with this id and no other one."""
        return with_id(self.headers, request_id)

    def without_length(self) -> RequestHead:
        """Return an equal head without a content length, for bodies of any length."""
        headers = [header for header in self.headers if header[0] != LENGTH]
        return RequestHead(self.method, self.path, self.target, headers)

    def make_lines(self, headers: Headers) -> bytes:
        """Encode these headers for workers and keep the result, which is the same for all requests with this head."""
        self.lines = lines = forwarded_lines([header for header in headers if header[0] != REQUEST_ID])
        return lines


class RequestContext:
    """One request, from its head to the end of its response.

    - `admitted`: the result of the head's check, after `admit`.
    - `trace`: its span, with tracing.
    - `hooks`: what is called before it is routed; None without any.
    - `notes`: values of hooks before it for those after its answer; None without any.
    """

    __slots__ = (
        "_gate",
        "_line",
        "_metrics",
        "admitted",
        "head",
        "hooks",
        "id",
        "logged",
        "notes",
        "server",
        "tenant",
        "trace",
    )

    admitted: Admitted

    def __init__(
        self,
        head: RequestHead,
        trace: RequestTrace | None,
        line: AccessLine | None,
        gate: AuthGate,
        metrics: RequestMetrics | None,
        server: ServerAddress | None,
        hooks: Hooks | None = None,
    ) -> None:
        self.head = head
        self.id = head.id or new_id()
        self.trace = trace
        self.tenant: Tenant | None = None
        self.logged = line is not None
        self._line = line
        self._gate = gate
        self.server = server
        self._metrics = metrics
        self.hooks = hooks
        self.notes: dict[str, Any] | None = None

    def admit(self) -> None:
        """Check the head. Raises RequestError (400, 401, 403, …) if it is invalid or not allowed."""
        head = self.head
        admitted = head.admitted
        if admitted is None:
            server = self.server
            port = None if server is None else server[1] or PROCESS_SOCKET
            admitted = head.admitted = self._gate.admit(head.method, head.target, head.headers, port)
        self.admitted = admitted
        self.tenant = admitted.tenant
        if self._gate.client_routing and admitted.tenant is None and head.id is None:
            self.id = correlation_id(head.headers) or self.id

    async def pass_hooks(self, body: bytes) -> bytes:
        """Return the body after the hooks, which may also change the head, the tenant and the session.

        Raises RequestError if a hook refuses the request, or fails.
        """
        hooks, head, admitted = self.hooks, self.head, self.admitted
        assert hooks is not None
        if not self.bodies.clearly_within_limits(body):
            await asyncio.to_thread(self.bodies.check_amount, body)
        tenant = self.tenant.name if self.tenant is not None else ""
        key = credential(head.headers)
        received = HookRequest(self.id.decode(), head.method, head.path, head.headers, body, key, tenant)
        request = await hooks.before(received, admitted.unknown_key)
        if admitted.unknown_key or request.tenant != tenant:
            self.admitted = self._gate.admitted_as(admitted, request.tenant)
            self.tenant = self.admitted.tenant
        headers = request.received_headers()
        if headers is not head.headers:
            self.head = RequestHead(head.method, head.path, head.target, headers)
            self.head.admitted = self.admitted
        self.notes = request.notes
        return request.body

    def checked(self, body: bytes, reads_chat: bool = False) -> tuple[bytes, bytes | UsualChat]:
        """Return the body to forward, and what its check has read. Raises RequestError (400, 413).

        `reads_chat`: read a usual chat's messages, too.
        """
        return self._gate.body(self.admitted, body, reads_chat)

    @property
    def bodies(self) -> BodyCheck:
        return self._gate.bodies

    def refusal(self, error: RequestError) -> tuple[Headers, bytes]:
        """Return the headers and body of an error response, and count it unless it is of an admitted own route."""
        body = call_error_body(self.head.path, error)
        headers = error_headers(error, body)
        if error.status == 401 or error.code == "not_allowed":
            headers.append((b"www-authenticate", b"Bearer"))
        if self._metrics is not None and not self._is_own:
            self._metrics.refused.labels(str(error.status)).inc()
        return headers, body

    @property
    def _is_own(self) -> bool:
        """True if the request was admitted and the service answers it itself."""
        admitted = self.head.admitted
        return admitted is not None and admitted.route.own

    @property
    def identity_headers(self) -> Headers:
        """The headers that may name the caller."""
        found = self.head.identity_headers
        if found is None:
            found = self.head.identity_headers = identity_headers(self.head.headers, self._gate.session_headers)
        return found

    def abandoned(self) -> None:
        """Count a request whose client disconnected before it was complete."""
        if self._metrics is not None and not self._is_own:
            self._metrics.abandoned.inc()

    @property
    def headers(self) -> Headers:
        """The request's headers with its id; names are in lower case."""
        return self.head.with_id(self.id)

    def headers_for_workers(self) -> Headers:
        """Return the headers to forward, without those for the router only."""
        return self._gate.headers_for_workers(self.admitted, self.headers)

    def lines_for_workers(self) -> bytes:
        """Return the encoded headers to forward, without the id and without headers of the connection."""
        lines = self.head.lines
        if lines is None:
            lines = self.head.make_lines(self.headers_for_workers())
        return lines

    def answered(self, status: int, headers: Headers) -> None:
        """Record the head of the response, with the router's own headers."""
        if self.tenant is not None and self._metrics is not None:
            self._metrics.of_tenant.labels(self.tenant.name, str(status)).inc()
        if self.trace is not None:
            self.trace.set(http_response_status_code=status)
        if self._line is not None:
            self._line.head(status, headers)

    def passed(self, size: int) -> None:
        """Record that `size` bytes of the response's body were sent."""
        if self._line is not None:
            self._line.passed(size)

    def end(self) -> None:
        """Write the request's log line and end its span."""
        if self._line is not None:
            self._line.write(**self._names())
        if self.trace is not None:
            # The answer's usage is read after its last byte was forwarded, in the same callback.
            asyncio.get_running_loop().call_soon(self.trace.end)

    def logging(self) -> AbstractContextManager[object]:
        """Return a context manager that adds the request's id to log lines."""
        return bound_contextvars(**self._names())

    def _names(self) -> dict[str, str]:
        names = {"request_id": self.id.decode()}
        return names | {"trace_id": self.trace.id} if self.trace is not None else names


class RequestContexts:
    """The factory of request contexts. Optional: `tracing`, the counting `metrics`, the access log, and `hooks`."""

    def __init__(
        self,
        gate: AuthGate,
        tracing: Tracing | None,
        metrics: RequestMetrics | None,
        log: bool,
        hooks: Hooks | None = None,
    ) -> None:
        self.gate = gate
        self._tracing = tracing
        self._metrics = metrics
        self._log = log
        self._hooks = hooks if hooks is not None and hooks.has_before else None

    def begin(self, head: RequestHead, server: ServerAddress | None = None) -> RequestContext:
        """Begin the context of a request that was received at the address `server`; None if that does not matter."""
        trace = None if self._tracing is None else self._tracing.request(head.method, head.path, head.headers)
        line = AccessLine(head.method, head.path) if self._log else None
        return RequestContext(head, trace, line, self.gate, self._metrics, server, self._hooks)


def context_of(scope: Scope) -> RequestContext:
    """Return the context of a request that the ASGI application answers."""
    context: RequestContext = scope[CONTEXT]
    return context
