"""The choice of a tracing backend by the settings."""

from __future__ import annotations

from router.observability.spans import Tracing


def tracing_to(endpoint: object | None) -> Tracing | None:
    """Return tracing that sends spans to a collector's URL; None without an endpoint."""
    if endpoint is None:
        return None
    from router.observability.otel import OtelTracing  # an extra

    return OtelTracing(str(endpoint))
