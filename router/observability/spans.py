"""Spans of what happens to a request, for those who want them: `router.observability.otel` makes them.

Where none are wanted there are none, and the client's `traceparent` passes as any other header does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from router.http.headers import Headers


class Span(ABC):
    """A part of a request's way."""

    @abstractmethod
    def set(self, **attributes: Any) -> None:
        """Say something of it: numbers and names, and nothing of a prompt."""

    @abstractmethod
    def end(self, problem: str | None = None) -> None:
        """It is over; `problem` names what went wrong. Only the first call counts."""

    @abstractmethod
    def inject(self, headers: Headers) -> Headers:
        """The headers of a request to a worker, which go on with this span."""


class RequestTrace(Span):
    """The span of a whole request. `id` is its trace's."""

    id: str

    @abstractmethod
    def span(self, name: str) -> Span:
        """A span in it that begins now."""


class Tracing(ABC):
    """Makes spans. `stop` sends what is left of them."""

    @abstractmethod
    def request(self, method: str, path: str, headers: Headers) -> RequestTrace:
        """A request came."""

    @abstractmethod
    def stop(self) -> None:
        """Nothing more is traced."""
