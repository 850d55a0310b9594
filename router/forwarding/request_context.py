"""The context of a request: its id, its trace, its tenant, and its line in the access log."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Final, TypeAlias

from starlette.types import Scope
from structlog.contextvars import bound_contextvars

from http_api.errors import RequestError, error_headers
from router.apis.endpoints import call_error_body
from router.auth import PROCESS_SOCKET, Admitted, AuthGate, BodyCheck, Tenant
from router.forwarding.request_head import RequestHead
from router.http.headers import Headers, new_id
from router.observability.access_log import AccessLine
from router.observability.metrics import RequestMetrics
from router.observability.spans import RequestTrace, Tracing

# The key of a request's context in its ASGI scope.
CONTEXT: Final = "kvrouter.request_context"
# The address that a request came to: a host and a port, or the path of a Unix socket and None.
ServerAddress: TypeAlias = tuple[str, int | None]


class RequestContext:
    """One request, from its head to the end of its answer. `logged`: it gets a line in the log. `trace`: None where
    nothing is traced."""

    __slots__ = ("_gate", "_line", "_metrics", "head", "id", "logged", "server", "tenant", "trace")

    def __init__(
        self,
        head: RequestHead,
        trace: RequestTrace | None,
        line: AccessLine | None,
        gate: AuthGate,
        metrics: RequestMetrics | None,
        server: ServerAddress | None,
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

    def admit(self) -> None:
        """Raise RequestError (400, 401, 403, …) for a head that is not accepted, and when whoever asks may not."""
        head = self.head
        admitted = head.admitted
        if admitted is None:
            server = self.server
            port = None if server is None else server[1] or PROCESS_SOCKET
            admitted = head.admitted = self._gate.admit(head.method, head.target, head.headers, port)
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
        return self._gate.body(self.admitted, body)

    @property
    def bodies(self) -> BodyCheck:
        """How bodies are checked."""
        return self._gate.bodies

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
        return self._gate.headers_for_workers(self.admitted, self.headers)

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

    def __init__(self, gate: AuthGate, tracing: Tracing | None, metrics: RequestMetrics | None, log: bool) -> None:
        self.gate = gate
        self._tracing = tracing
        self._metrics = metrics
        self._log = log

    def begin(self, head: RequestHead, server: ServerAddress | None = None) -> RequestContext:
        """Begin the context of a request that was received at the address `server`; None if that does not matter."""
        trace = None if self._tracing is None else self._tracing.request(head.method, head.path, head.headers)
        line = AccessLine(head.method, head.path) if self._log else None
        return RequestContext(head, trace, line, self.gate, self._metrics, server)


def context_of(scope: Scope) -> RequestContext:
    """Return the context of a request that the ASGI application answers."""
    context: RequestContext = scope[CONTEXT]
    return context
