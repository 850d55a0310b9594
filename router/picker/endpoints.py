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
        if worker is None or worker is first or worker.health.full:
            continue
        if worker.key.authorization != first.key.authorization:
            continue  # Envoy sends a fallback the same headers, so its API key must be the same
        address = state.address_of(worker)
        if address and within(address, subset):
            found.setdefault(address)
    return list(found)[:most]


def scores(state: PickerState, assignment: Assignment | None) -> dict[str, float] | None:
    """Return the score of each candidate's endpoint: 1 for the lowest cost, 0 for the highest. None: not reported."""
    if not state.settings.emit_scores or assignment is None:
        return None
    by_url = {worker.url: worker for worker in state.fleet.workers}
    totals: dict[str, float] = {}
    for cost in assignment.decision.costs:
        worker = by_url.get(cost.candidate.target.worker)
        address = None if worker is None else state.address_of(worker)
        if address is not None:
            totals[address] = min(cost.total, totals.get(address, cost.total))
    if not totals:
        return {}
    lowest, highest = min(totals.values()), max(totals.values())
    span = highest - lowest
    return {address: 1.0 if not span else (highest - total) / span for address, total in totals.items()}


def none_allowed() -> RequestError:
    """Return the error for a subset without a worker."""
    return RequestError(
        "No worker of those that the gateway allows can be reached. Try again later.",
        status=503,
        type="service_unavailable",
        code="no_worker_available",
    )
