"""Spans of what happens to a request, for those who want them: `router.otel` makes real ones.

This is what there is without: nothing is traced, and the client's `traceparent` passes as any other header does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from multidict import CIMultiDict
from starlette.types import ASGIApp


class Span:
    """A part of a request's way."""

    def set(self, **attributes: Any) -> None:
        """Say something of it: numbers and names, and nothing of a prompt."""


class Tracing:
    """Makes spans. `stop` sends what is left of them."""

    def around(self, app: ASGIApp) -> ASGIApp:
        """The application with a span around every request."""
        return app

    def stop(self) -> None:
        """Nothing more is traced."""

    @contextmanager
    def span(self, name: str, **attributes: Any) -> Iterator[Span]:  # noqa: ARG002
        """A span that lasts as long as the context, within the one that lasts now."""
        yield Span()

    def inject(self, headers: CIMultiDict[str]) -> CIMultiDict[str]:
        """The headers of a request to a worker, which go on with the span that lasts now."""
        return headers


def tracing_to(endpoint: object | None) -> Tracing:
    """Spans that go to a collector's URL; None: none are made."""
    if endpoint is None:
        return Tracing()
    from router.otel import OtelTracing  # an extra

    return OtelTracing(str(endpoint))
