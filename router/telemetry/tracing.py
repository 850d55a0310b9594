"""Spans of what happens to a request, for those who want them: `router.telemetry.otel` makes real ones.

This is what there is without: nothing is traced, and the client's `traceparent` passes as any other header does.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

Headers = list[tuple[bytes, bytes]]


class Span:
    """A part of a request's way. As a context it ends with it, and with the exception that ends it."""

    def set(self, **attributes: Any) -> None:
        """Say something of it: numbers and names, and nothing of a prompt."""

    def end(self, problem: str | None = None) -> None:
        """It is over; `problem` names what went wrong. Only the first call counts."""

    def inject(self, headers: Headers) -> Headers:
        """The headers of a request to a worker, which go on with this span."""
        return headers

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.end(kind.__name__ if kind else None)


class RequestTrace(Span):
    """The span of a whole request. `id` is its trace's; None where nothing is traced."""

    id: str | None = None

    def span(self, name: str, **attributes: Any) -> Span:  # noqa: ARG002
        """A span in it that begins now."""
        return NO_SPAN


class Tracing:
    """Makes spans. `stop` sends what is left of them. `active`: whether any are made."""

    active = False

    def request(self, method: str, path: str, headers: Headers) -> RequestTrace:  # noqa: ARG002
        """A request came."""
        return _NO_TRACE

    def stop(self) -> None:
        """Nothing more is traced."""


NO_SPAN = Span()
_NO_TRACE = RequestTrace()


def tracing_to(endpoint: object | None) -> Tracing:
    """Spans that go to a collector's URL; None: none are made."""
    if endpoint is None:
        return Tracing()
    from router.telemetry.otel import OtelTracing  # an extra

    return OtelTracing(str(endpoint))
