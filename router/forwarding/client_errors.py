"""Errors for clients whose request no worker answered completely."""

from __future__ import annotations

from http_api.errors import RequestError


def broken_off() -> RequestError:
    """Return the error for a client whose worker did not complete its response."""
    return RequestError("The worker broke off its answer.", status=502, type="upstream_error")


def not_reached(tried: int) -> RequestError:
    """Return the error for a client when no further attempt is allowed, after `tried` attempts."""
    return RequestError(
        f"{tried} workers could not be reached. Retry later.",
        status=503,
        type="service_unavailable",
        code="no_worker_available",
    )
