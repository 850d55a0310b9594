"""OpenTelemetry spans: `request`, and in it `tokenize`, `decide` and `upstream`, sent by OTLP over HTTP.

A trace that the client began (W3C's `traceparent`) goes on here and in the worker; otherwise it begins here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import structlog
from multidict import CIMultiDict
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.tracing import Span, Tracing

_EXPORT_TIMEOUT = 5.0  # seconds; what a collector does not take is dropped
_propagator = TraceContextTextMapPropagator()


class _Span(Span):
    def __init__(self, span: OtelSpan) -> None:
        self._span = span

    def set(self, **attributes: Any) -> None:
        self._span.set_attributes({_attribute(name): value for name, value in attributes.items()})

    @property
    def trace_id(self) -> str:
        return format_trace_id(self._span.get_span_context().trace_id)


class OtelTracing(Tracing):
    """Spans that go to a collector, in batches of a thread of its own. `stop` sends what is left."""

    def __init__(self, endpoint: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "kvrouter"}), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvrouter")

    def around(self, app: ASGIApp) -> ASGIApp:
        return _TracedRequests(app, self)

    def stop(self) -> None:
        """Send what is left, and end."""
        self._provider.shutdown()

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[Span]:
        with self._span(name, SpanKind.CLIENT if name == "upstream" else SpanKind.INTERNAL, attributes) as span:
            yield span

    def inject(self, headers: CIMultiDict[str]) -> CIMultiDict[str]:
        _propagator.inject(headers)
        return headers

    @contextmanager
    def request(self, context: Context, **attributes: Any) -> Iterator[_Span]:
        """The span of a request as it came."""
        with self._span("request", SpanKind.SERVER, attributes, context) as span:
            yield span

    @contextmanager
    def _span(
        self, name: str, kind: SpanKind, attributes: dict[str, Any], context: Context | None = None
    ) -> Iterator[_Span]:
        # An exception's message may hold what the client sent: only its name is told.
        with self._tracer.start_as_current_span(
            name, context, kind, record_exception=False, set_status_on_exception=False
        ) as span:
            told = _Span(span)
            told.set(**attributes)
            try:
                yield told
            except BaseException as error:
                span.set_status(Status(StatusCode.ERROR, type(error).__name__))
                raise


class _TracedRequests:
    """Traces the requests to an application."""

    def __init__(self, app: ASGIApp, tracing: OtelTracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        with self._tracing.request(
            _propagator.extract(carrier), http_request_method=scope["method"], url_path=scope["path"]
        ) as span:

            async def send_and_tell(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set(http_response_status_code=message["status"])
                await send(message)

            with structlog.contextvars.bound_contextvars(trace_id=span.trace_id):
                await self._app(scope, receive, send_and_tell)


def _attribute(name: str) -> str:
    """The name in OpenTelemetry's conventions, or one of ours."""
    return _CONVENTIONS.get(name, f"kvrouter.{name}")


_CONVENTIONS = {
    "http_request_method": "http.request.method",
    "http_response_status_code": "http.response.status_code",
    "url_path": "url.path",
    "model": "gen_ai.request.model",
}
