"""Headers by which a client routes its request itself. `proxy.client_routing` allows them, and never for tenants.

- `x-smg-routing-key`: the session, before all other names of it.
- `x-smg-target-worker`: the only worker, by its index in `GET /workers`, its URL or its name.
- `x-data-parallel-rank`: the only DP rank.
- `x-correlation-id`: the request's id, if it has no `x-request-id`.
"""

from __future__ import annotations

from collections.abc import Collection

from http_api.errors import RequestError
from router.apis.identities import MAX_LENGTH
from router.apis.requests import RoutedRequest
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.http.headers import RANK_HEADER, REQUEST_ID, Headers, given_id, whole_number

_ROUTING_KEY = b"x-smg-routing-key"
_TARGET_WORKER = b"x-smg-target-worker"
_CORRELATION_ID = b"x-correlation-id"


def correlation_id(headers: Headers) -> bytes | None:
    """Return the id in `x-correlation-id`; None without a usable one."""
    return given_id([(REQUEST_ID, value) for name, value in headers if name == _CORRELATION_ID])


def follow_client(prompt: RoutedRequest, headers: Headers, fleet: Fleet) -> Collection[Worker]:
    """Apply the headers to a prompt, and return the workers that it may not be sent to.

    Raises RequestError: 503 for a worker that does not exist, 400 for a rank that no remaining worker has.
    """
    given = {name: value.decode("latin-1") for name, value in headers}
    if key := given.get(_ROUTING_KEY):
        prompt.session = key[:MAX_LENGTH]
    allowed = fleet.workers
    if target := given.get(_TARGET_WORKER):
        allowed = [_named_worker(fleet, target)]
    if rank := given.get(RANK_HEADER):
        number = whole_number(rank.encode("latin-1"))
        prompt.dp_rank = -1 if number is None else number
        if not any(prompt.dp_rank in worker.ranks() for worker in allowed):
            raise RequestError(
                f"No worker has the DP rank {rank!r}. GET /workers lists them.", param="x-data-parallel-rank"
            )
    return [worker for worker in fleet.workers if worker not in allowed] if target else ()


def _named_worker(fleet: Fleet, named: str) -> Worker:
    workers = list(fleet.workers)
    place = whole_number(named.encode("latin-1"))
    if place is not None and place < len(workers):
        return workers[place]
    worker = fleet.find(named)
    if worker is None:
        raise RequestError(
            f"There is no worker {named!r}. GET /workers lists them.",
            status=503,
            type="service_unavailable",
            param="x-smg-target-worker",
            code="no_worker_available",
        )
    return worker
