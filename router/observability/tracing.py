"""Whether spans are made, and by what."""

from __future__ import annotations

from router.observability.spans import Tracing


def tracing_to(endpoint: object | None) -> Tracing | None:
    """Spans that go to a collector's URL; None: none are made."""
    if endpoint is None:
        return None
    from router.observability.otel import OtelTracing  # an extra

    return OtelTracing(str(endpoint))
