"""OpenTelemetry spans, exported by OTLP over HTTP: `request`, and in it `tokenize`, `decide` and `upstream`.

`gen_ai.py` renames the span of a request for a model, and has its attributes.

A trace from the client (W3C's `traceparent`) continues in the router and in the worker; without one, a new trace
begins. Each span knows its parent, because callbacks have no lasting context.
"""

from __future__ import annotations

from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.http.headers import Headers
from router.observability.spans import RequestTrace, Span, Tracing

_EXPORT_TIMEOUT = 5.0  # seconds, after which spans are dropped
_propagator = TraceContextTextMapPropagator()


class OtelTracing(Tracing):
    """Tracing that exports spans to a collector in batches, from a thread of its own."""

    def __init__(self, endpoint: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "kvrouter"}), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint, timeout=_EXPORT_TIMEOUT)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvrouter")

    def request(self, method: str, path: str, headers: Headers) -> RequestTrace:
        carrier = {name.decode(): value.decode("latin-1") for name, value in headers}
        span = self._tracer.start_span("request", _propagator.extract(carrier), SpanKind.SERVER)
        trace = _OtelTrace(self._tracer, span)
        trace.set(http_request_method=method, url_path=path)
        return trace

    def stop(self) -> None:
        self._provider.shutdown()


class _OtelSpan(Span):
    def __init__(self, span: OtelSpan) -> None:
        self._span = span

    def set(self, **attributes: Any) -> None:
        self._span.set_attributes({_attribute(name): value for name, value in attributes.items()})

    def end(self, problem: str | None = None) -> None:
        if self._span.is_recording():
            if problem is not None:
                # An exception's message may contain the client's data, so only its name is exported.
                self._span.set_status(Status(StatusCode.ERROR, problem))
            self._span.end()

    def inject(self, headers: Headers) -> Headers:
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, self._context())
        added = [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]
        names = {name for name, _ in added}
        return [*(header for header in headers if header[0] not in names), *added]

    def _context(self) -> Context:
        return set_span_in_context(self._span)


class _OtelTrace(_OtelSpan, RequestTrace):
    def __init__(self, tracer: Tracer, span: OtelSpan) -> None:
        super().__init__(span)
        self._tracer = tracer
        self.id = format_trace_id(span.get_span_context().trace_id)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def span(self, name: str) -> Span:
        kind = SpanKind.CLIENT if name == "upstream" else SpanKind.INTERNAL
        return _OtelSpan(self._tracer.start_span(name, self._context(), kind))


def _attribute(name: str) -> str:
    return name if "." in name else _CONVENTIONS.get(name, f"kvrouter.{name}")


_CONVENTIONS = {
    "http_request_method": "http.request.method",
    "http_response_status_code": "http.response.status_code",
    "url_path": "url.path",
    "model": "gen_ai.request.model",
}
