"""Routes that list, add, drain and remove workers. All but `GET` require the admin token.

- `GET /workers` lists the state, load, streams and cached blocks of each worker.
- `POST /workers` adds a worker. The body has the fields of `WorkerSettings`, such as `url`, `name` and `model`.
  `?wait=SECONDS` answers when it may receive requests.
- `DELETE /workers?url=…` or `?name=…` removes a worker that was added by `POST /workers`.
- `DELETE /workers/{id}` removes it by the `id` that `GET /workers` shows.
- `POST /workers/drain` with `{"url"}` or `{"name"}` sends a worker no new requests. `POST /workers/undrain` reverts it.

Trainers register their engines by the calls of other routers, which are accepted too:

- `worker_type` and `id` in the body of `POST /workers` (SGLang's router): a role, and a name.
- `POST /add_worker?url=…`, `POST /remove_worker?url=…` and `GET /list_workers` (older SGLang routers, miles).
- `POST /finish_session?session_id=…` (vLLM's router) ends a session.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar
from uuid import NAMESPACE_URL, uuid5

import jiter
import msgspec
from fastapi import APIRouter, Depends, Request
from pydantic import ValidationError

from http_api.errors import RequestError
from http_api.openapi import errors, json_body, schema_body
from http_api.routes import check_token
from indexer import Target
from indexer.api.routes import publishers_report, workers_report
from kvevents import EventSource
from router.apis.identities import MAX_LENGTH
from router.app.services import Services, services_of
from router.fleet.allowed_networks import AddressNotAllowedError, AllowedNetworks
from router.fleet.event_streams import allowed_source
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker, url_of
from router.http.worker_url import host_of, split_user_info
from router.settings import Role, WorkerSettings
from router.settings.mistakes import mistakes

T = TypeVar("T")

MAX_ADDED = 1024
LONGEST_WAIT: Final = 3600.0

# Clients must not make the router read its files or its environment.
_NOT_OVER_HTTP = ("api_key_file", "api_key_env")

# SGLang's names of roles.
_ROLES = {"regular": Role.BOTH, "prefill": Role.PREFILL, "decode": Role.DECODE}


class _Named(msgspec.Struct):
    """A worker by its URL or its name. Each field accepts both."""

    url: str = ""
    name: str = ""


class _Added(msgspec.Struct):
    """A worker by its URL, under either of its names in other routers."""

    url: str = ""
    worker_url: str = ""


# Routes that list workers, and those that change them, which require the admin token.
routes = APIRouter()
changing_routes = APIRouter(dependencies=[Depends(check_token)])


@routes.get("/workers")
async def workers(request: Request) -> dict[str, Any]:
    """List all workers with their state, load, streams and cached blocks, and the publishers that connected."""
    services = services_of(request)
    return {
        "workers": _report(services),
        "publishers": publishers_report(services.indexer),
        "tokenizers": services.tokenizer_source.report(),
    }


@routes.get("/list_workers")
async def list_workers(request: Request) -> dict[str, list[str]]:
    """List the URLs of all workers, as older SGLang routers do."""
    return {"urls": [worker.url for worker in services_of(request).fleet.workers]}


@routes.post("/finish_session", responses=errors(400))
async def finish_session(request: Request, session_id: str = "") -> dict[str, str]:
    """End a session at all routers: its cached prompt is kept no more. Unknown sessions are no error."""
    if not session_id:
        raise RequestError("session_id is missing. Send ?session_id=….", param="session_id")
    state, name = services_of(request).routing.state, session_id[:MAX_LENGTH]
    state.gate.sessions.finish(name)
    state.sharing.share_finished(name)
    return {"status": "success", "session_id": session_id}


def _report(services: Services) -> list[dict[str, Any]]:
    by_url = {worker.url: worker for worker in services.fleet.workers}
    report = workers_report(services.indexer)
    unseen = dict(by_url)
    for entry in report:  # a worker with several models has an entry for each
        unseen.pop(entry["worker"], None)
        if worker := by_url.get(entry["worker"]):
            entry |= named(worker) | worker_status(worker)
            for rank in entry["ranks"]:
                rank |= _rank_load(services, worker, rank["dp_rank"])
                rank |= _learned(services, worker.target(rank["dp_rank"], entry["model"]))
    return report + [named(worker) | {"ranks": []} | worker_status(worker) for worker in unseen.values()]


def _rank_load(services: Services, worker: Worker, dp_rank: int) -> dict[str, Any]:
    load = services.routing.state.load.of(worker.url, dp_rank)
    peers = services.routing.state.sharing.peer_load.of(worker.url, dp_rank)
    return {
        "load": {"requests": load.requests, "pending": load.pending, "context": load.context},
        "saturated": services.admission.saturated(worker, dp_rank),
        "elsewhere": {"requests": peers.requests, "pending": peers.pending, "context": peers.context},
    }


def _learned(services: Services, target: Target) -> dict[str, Any]:
    """Return the learned facts about a DP rank's cache: bounds of what it keeps, and tokens computed again per hit."""
    found: dict[str, Any] = {}
    cache = services.routing.state.audit.caches.find(target)
    if cache is not None and (kept := cache.retention) is not None:
        found["retention"] = {"tokens": kept.tokens, "seconds": kept.seconds and round(kept.seconds, 1)}
    if cache is not None and (tokens := cache.draft_block.tokens):
        found["recomputed_tokens"] = tokens
    return found


@changing_routes.post(
    "/workers",
    status_code=201,
    openapi_extra=schema_body(WorkerSettings.model_json_schema()),
    responses=errors(400, 401, 403, 409, 503),
)
async def add(request: Request, wait: float = 0.0) -> dict[str, Any]:
    """Add a worker. If its URL was added before, its settings are replaced.

    - `wait`: maximum seconds until it may receive requests. The answer is sent as soon as it may.
    """
    if not 0 <= wait <= LONGEST_WAIT:
        raise RequestError(f"wait: {wait} is not from 0 to {LONGEST_WAIT:g} seconds.", param="wait")
    services = services_of(request)
    worker = await _assign(services, _worker_settings(await request.body()))
    if wait:
        worker = await _until_up(services.fleet, worker.url, wait)
    return named(worker) | worker_status(worker)


async def _until_up(fleet: Fleet, url: str, seconds: float) -> Worker:
    """Return a worker when it may receive requests. Raises RequestError: 503 after the deadline, 404 if removed."""
    try:
        async with asyncio.timeout(seconds):
            while not _find(fleet, url).up:  # noqa: ASYNC110 - several changes make a worker ready
                await asyncio.sleep(0.05)
    except TimeoutError:
        reason = f"The worker is {_find(fleet, url).state} after {seconds:g} seconds. It stays added."
        raise RequestError(
            reason, status=503, type="service_unavailable", param="wait", code="worker_not_ready"
        ) from None
    return _find(fleet, url)


async def _assign(services: Services, settings: WorkerSettings) -> Worker:
    fleet = services.fleet
    await _check_addresses(settings, services.networks)
    added = [known for known in fleet.assigned("api") if known.url != settings.url]
    known = fleet.find(str(settings.url))
    if known is not None and known.source != "api":
        raise _foreign(known)
    _check_name(fleet, settings)
    if len(added) >= MAX_ADDED:
        raise RequestError(f"There are {MAX_ADDED} added workers. Remove one first.", status=409, param="url")
    fleet.assign("api", [*added, settings])
    return _find(fleet, str(settings.url))


@changing_routes.post("/add_worker", openapi_extra=json_body(_Added), responses=errors(400, 401, 403, 409))
async def add_by_url(request: Request, url: str = "") -> dict[str, Any]:
    """Add a worker by its URL, as older SGLang routers do."""
    given = url or _added_url(await request.body())
    services = services_of(request)
    await _assign(services, _worker_settings(msgspec.json.encode({"url": given})))
    return _in_flight(services.fleet)


@changing_routes.post("/remove_worker", openapi_extra=json_body(_Added), responses=errors(400, 401, 404, 409))
async def remove_by_url(request: Request, url: str = "") -> dict[str, Any]:
    """Remove a worker by its URL, as older SGLang routers do. Its requests in flight continue."""
    fleet = services_of(request).fleet
    _unassign(fleet, _find(fleet, url or _added_url(await request.body())))
    return _in_flight(fleet)


def _in_flight(fleet: Fleet) -> dict[str, Any]:
    """Return the requests in flight of each worker, by URL."""
    return {"status": "success", "worker_urls": {each.url: len(each.health.attempts) for each in fleet.workers}}


@changing_routes.delete("/workers", responses=errors(400, 401, 404, 409))
async def remove(request: Request, url: str = "", name: str = "") -> dict[str, Any]:
    """Remove a worker that was added by this API. Its requests in flight continue."""
    fleet = services_of(request).fleet
    return _unassign(fleet, _find(fleet, url or name))


@changing_routes.delete("/workers/{id}", responses=errors(400, 401, 404, 409))
async def remove_by_id(request: Request, id: str) -> dict[str, Any]:
    """Remove a worker that was added by this API, by its `id`. Its requests in flight continue."""
    fleet = services_of(request).fleet
    worker = next((each for each in fleet.workers if id_of(each) == id), None)
    return _unassign(fleet, worker or _find(fleet, id))


def _unassign(fleet: Fleet, worker: Worker) -> dict[str, Any]:
    if worker.source != "api":
        raise _foreign(worker)
    fleet.assign("api", [known for known in fleet.assigned("api") if known.url != worker.settings.url])
    return {"worker": worker.name, "removed": True, "requests_in_flight": len(worker.health.attempts)}


@changing_routes.post("/workers/drain", openapi_extra=json_body(_Named), responses=errors(400, 401, 404))
async def drain(request: Request) -> dict[str, Any]:
    """Send a worker no new requests. Its state is `drained` once its requests in flight have ended."""
    return await _set_draining(request, True)


@changing_routes.post("/workers/undrain", openapi_extra=json_body(_Named), responses=errors(400, 401, 404))
async def undrain(request: Request) -> dict[str, Any]:
    """Send requests to a drained worker again."""
    return await _set_draining(request, False)


async def _set_draining(request: Request, draining: bool) -> dict[str, Any]:
    fleet = services_of(request).fleet
    worker = _find(fleet, _which(await request.body()))
    fleet.drain(worker, draining)
    return named(worker) | worker_status(worker)


def named(worker: Worker) -> dict[str, Any]:
    """Return the fields that identify a worker: its name, its URL, and its id, which fits into a path."""
    return {"worker": worker.name, "url": worker.url, "id": id_of(worker)}


def id_of(worker: Worker) -> str:
    """Return a worker's name; without one, an id that depends on its URL alone."""
    return worker.name if worker.name != worker.url else str(uuid5(NAMESPACE_URL, worker.url))


def worker_status(worker: Worker) -> dict[str, Any]:
    """Return the state of a worker, for `GET /workers`."""
    return {
        "up": worker.up,
        "state": worker.state,
        "problem": worker.problem,
        "reason": worker.reason,
        "share": round(worker.share, 2),
        "requests_in_flight": len(worker.health.attempts),
        "source": worker.source,
        "weight": worker.settings.weight,
        "role": worker.role,
        "labels": worker.settings.labels,
    }


def _which(body: bytes) -> str:
    given = _decoded(body, _Named, '{"url": "…"} or {"name": "…"}')
    return given.url or given.name


def _added_url(body: bytes) -> str:
    """Return the URL in the body of `/add_worker`. Raises RequestError (400) without one."""
    given = _decoded(body or b"{}", _Added, "?url=http://…")
    url = given.url or given.worker_url
    if not url:
        raise RequestError("url is missing. Send ?url=http://… of a worker.", param="url")
    return url


def _decoded(body: bytes, kind: type[T], form: str) -> T:
    """Return what a body says of a worker. Raises RequestError (400), which asks for `form`."""
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"{error}. Send {form} of a worker.", param="url") from error


def _find(fleet: Fleet, url_or_name: str) -> Worker:
    if not url_or_name:
        raise RequestError("url and name are empty. Send the URL or the name of a worker.", param="url")
    worker = fleet.find(url_or_name)
    if worker is None:
        shown = split_user_info(url_or_name)[0]
        raise RequestError(
            f"There is no worker {shown!r}. GET /workers lists them.", status=404, type="not_found_error", param="url"
        )
    return worker


def _check_name(fleet: Fleet, settings: WorkerSettings) -> None:
    """Check that no other worker has the name of an added worker. Raises RequestError (409)."""
    if settings.name is None:
        return
    known = fleet.find(settings.name)
    if known is not None and known.url != url_of(settings):
        raise RequestError(
            f"name: {settings.name!r} is the name of another worker. Choose another one.", status=409, param="name"
        )


def _foreign(worker: Worker) -> RequestError:
    return RequestError(
        f"The worker {worker.name!r} is from {worker.source}. Change it there, or drain it.", status=409, param="url"
    )


def _worker_settings(body: bytes) -> WorkerSettings:
    try:
        given = jiter.from_json(body, catch_duplicate_keys=True)
    except ValueError as error:
        raise RequestError(f'The body is not JSON: {error}. Send {{"url": "http://…"}}.') from error
    for name in _NOT_OVER_HTTP:
        if isinstance(given, dict) and given.get(name) is not None:
            raise RequestError(f"{name} is valid only in the settings file. Send api_key.", param=name)
    if isinstance(given, dict) and not given.keys().isdisjoint(("worker_type", "id")):
        body = msgspec.json.encode(_renamed(given))
    try:
        return WorkerSettings.model_validate_json(body)
    except ValidationError as error:
        param = str(next(iter(error.errors()[0]["loc"]), "")) or None
        raise RequestError(f'{mistakes(error, WorkerSettings)[0]}. Send {{"url": "http://…"}}.', param=param) from error


def _renamed(given: dict[str, Any]) -> dict[str, Any]:
    """Return a worker's settings with `role` for SGLang's `worker_type`, and `name` for `id`. Raises RequestError."""
    renamed = dict(given)
    kind, id = renamed.pop("worker_type", None), renamed.pop("id", None)
    if kind is not None:
        role = _ROLES.get(kind) if isinstance(kind, str) else None
        if role is None:
            raise RequestError(f"worker_type is not one of {', '.join(_ROLES)}.", param="worker_type")
        if renamed.setdefault("role", role) != role:
            raise RequestError("worker_type and role differ. Send one of them.", param="worker_type")
    if id is not None and renamed.setdefault("name", id) != id:
        raise RequestError("id and name differ. Send one of them.", param="id")
    return renamed


async def _check_addresses(settings: WorkerSettings, networks: AllowedNetworks) -> None:
    """Check that the router may connect to all addresses in a worker's settings. Raises RequestError."""
    for field, host in (("url", host_of(str(settings.url).rstrip("/"))), ("pull_host", settings.pull_host)):
        try:
            if host is not None:
                await networks.check(host)
        except AddressNotAllowedError as error:
            raise _not_allowed(field, error) from error
    for stream in settings.streams or []:
        if any(each and not each.startswith("tcp://") for each in (stream.endpoint, stream.replay_endpoint)):
            raise RequestError(f"streams: {stream.endpoint} is not a tcp:// endpoint. Send one.", param="streams")
        source = EventSource(stream.dp_rank, stream.endpoint, stream.replay_endpoint)
        try:
            await allowed_source(networks, source)
        except ValueError as error:
            raise _not_allowed("streams", error) from error
        if source.connects:
            raise RequestError(
                f"streams: publishers listen at {stream.endpoint}. Send the address that subscribers connect to.",
                param="streams",
            )


def _not_allowed(param: str, error: Exception) -> RequestError:
    return RequestError(f"{param}: {error}", status=403, type="permission_error", param=param)
