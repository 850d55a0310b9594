"""The endpoints that may receive a request, and the fallbacks after the first."""

from __future__ import annotations

from http_api.errors import RequestError
from router.fleet.worker import Worker
from router.picker.state import PickerState
from router.routing.assignment import Assignment


def within(address: str, subset: set[str] | None) -> bool:
    """Return whether an endpoint `ip:port` is in a subset. An entry without a port matches all ports."""
    return subset is None or address in subset or address.rpartition(":")[0].strip("[]") in subset


def outside(state: PickerState, subset: set[str] | None) -> list[Worker]:
    """Return the workers that may not receive a request."""
    if subset is None:
        return []
    return [each for each in state.fleet.workers if not within(state.address_of(each) or "", subset)]


def fallbacks(
    state: PickerState, assignment: Assignment | None, first: Worker, subset: set[str] | None = None
) -> list[str]:
    """Return the endpoints to try after the request's worker, the best first."""
    most = state.settings.fallbacks
    if not most or assignment is None or assignment.prefill is not None:
        return []  # a decode belongs to its prefill
    by_url = {worker.url: worker for worker in state.fleet.workers}
    found: dict[str, None] = {}
    for cost in sorted(assignment.decision.costs, key=lambda cost: cost.total):
        worker = by_url.get(cost.candidate.target.worker)
        if worker is None or worker is first or worker.health.circuit.paused:
            continue
        if worker.key.authorization != first.key.authorization:
            continue  # Envoy sends a fallback the same headers, so its API key must be the same
        address = state.address_of(worker)
        if address and within(address, subset):
            found.setdefault(address)
    return list(found)[:most]


def none_allowed() -> RequestError:
    """Return the error for a subset without a worker."""
    return RequestError(
        "No worker of those that the gateway allows can be reached. Try again later.",
        status=503,
        type="service_unavailable",
        code="no_worker_available",
    )
