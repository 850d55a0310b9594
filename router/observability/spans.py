"""The interface of tracing: spans of a request's steps, which `router.observability.otel` implements.

Without tracing there are no spans, and the client's `traceparent` is forwarded like any other header.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from router.http.headers import Headers


class Span(ABC):
    """A step of a request."""

    @abstractmethod
    def set(self, **attributes: Any) -> None:
        """Set attributes: numbers and names, never parts of a prompt."""

    @abstractmethod
    def end(self, problem: str | None = None) -> None:
        """End the span; `problem` names an error. Later calls have no effect."""

    @abstractmethod
    def inject(self, headers: Headers) -> Headers:
        """Return the headers of a request to a worker, which continue the trace with this span."""


class RequestTrace(Span):
    """The span of a whole request; `id` is its trace's id."""

    id: str

    @abstractmethod
    def rename(self, name: str) -> None:
        """Change the span's name."""

    @abstractmethod
    def span(self, name: str) -> Span:
        """Return a new span inside this one, which begins now."""


class Tracing(ABC):
    """The factory of traces."""

    @abstractmethod
    def request(self, method: str, path: str, headers: Headers) -> RequestTrace:
        """Return the trace of a received request."""

    @abstractmethod
    def stop(self) -> None:
        """Export the remaining spans and stop."""
