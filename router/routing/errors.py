"""What a request is refused with when no worker can take it."""

from __future__ import annotations

from http_api.errors import RequestError
from router.fleet.fleet import Fleet


def unavailable(message: str) -> RequestError:
    """503: no worker can be reached."""
    return RequestError(
        f"{message} Try again later.", status=503, type="service_unavailable", code="no_worker_available"
    )


def unknown_model(fleet: Fleet, name: str) -> RequestError:
    """404 with the names there are; 503 while no worker has answered yet."""
    known = sorted(fleet.names())
    if not known:
        return unavailable("No worker has answered yet, so no model is known.")
    return RequestError(
        f"The model {name!r} does not exist. Send one of: {', '.join(known)}.",
        status=404,
        type="not_found_error",
        param="model",
        code="model_not_found",
    )
