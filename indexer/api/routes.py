"""Routes of the index API, in the form of Mooncake's RFC 1403.

- `POST /match`: return the cached tokens of a prompt, by target.
- `POST /query`: return the cached tokens of a token sequence, by tenant and instance.
- `POST /query_by_hash`: return the cached tokens of a prefix that is given by hashes.
- `POST /register`: follow the event stream of one DP rank.
- `POST /unregister`: stop following an instance.
- `GET /dump`: return the whole index, for another indexer that starts.

`indexer_app` serves them as a service of its own, which `kvrouter indexer` runs.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from http_api.errors import RequestError, named_first
from http_api.openapi import api_page_routes, errors, json_body
from http_api.routes import add_error_handlers, check_token, decode_body, encoded_response, json_response
from indexer.api.bodies import HashQueryBody, MatchBody, QueryBody, RegisterBody, UnregisterBody, one_of
from indexer.api.metrics import IndexCollector, add_process_metrics, build_info
from indexer.api.questions import Questions
from indexer.index import DEFAULT_TENANT
from indexer.indexer import Indexer, TargetReport
from indexer.targets import Registration, Target
from kvevents import EventSource, Tier

# Checks whether a registration is allowed, and replaces host names by addresses.
# Raises ValueError, whose text begins with the wrong field.
Admit = Callable[[Registration], Awaitable[Registration]]

_LONGEST_NAME = 512  # characters


@dataclass(frozen=True, slots=True)
class IndexApi:
    """The objects behind the index API: `state.index` of an application, whose `state.token` protects changes."""

    indexer: Indexer
    questions: Questions
    admit: Admit


index_routes = APIRouter()
_protected = [Depends(check_token)]


def _api(request: Request) -> IndexApi:
    api: IndexApi = request.app.state.index
    return api


@index_routes.post(
    "/register",
    status_code=201,
    dependencies=_protected,
    openapi_extra=json_body(RegisterBody),
    responses=errors(400, 401),
)
async def register(request: Request) -> Response:
    """Follow the event stream of one DP rank. An identical registration does nothing; another one restarts it."""
    body = decode_body(await request.body(), RegisterBody)
    api, registration = _api(request), _registration(body)
    try:
        api.indexer.register(await api.admit(registration))
    except ValueError as error:
        raise RequestError(str(error), param=named_first(error)) from error
    rank = registration.target.dp_rank
    return json_response({"status": "registered", "instance_id": body.instance_id, "dp_rank": rank}, 201)


@index_routes.post(
    "/unregister",
    dependencies=_protected,
    openapi_extra=json_body(UnregisterBody),
    responses=errors(400, 401, 404),
)
async def unregister(request: Request) -> Response:
    """Stop following an instance, or the part of it that the other fields select, and remove its blocks."""
    body = decode_body(await request.body(), UnregisterBody)
    indexer = _api(request).indexer
    targets = [known.target for known in indexer.registered() if _selects(body, known.target)]
    if not targets:
        raise RequestError(
            f"no registered target has instance_id {body.instance_id!r} in the selected tenant",
            status=404,
            type="not_found_error",
            param="instance_id",
        )
    indexer.unregister(targets)
    removed = [f"{target.worker}|{target.tenant}|{target.dp_rank}" for target in targets]
    answer = {"status": "unregistered", "instance_id": body.instance_id, "targets": len(targets)}
    return json_response({**answer, "removed_instances": removed})


@index_routes.get("/dump", response_class=StreamingResponse, responses={200: {"content": {"application/x-ndjson": {}}}})
async def dump(request: Request) -> StreamingResponse:
    """Send the whole index as lines of JSON, so that another indexer starts warm."""
    return StreamingResponse(_api(request).indexer.dump(), media_type="application/x-ndjson")


@index_routes.post("/match", openapi_extra=json_body(MatchBody), responses=errors(400, 404))
async def match(request: Request) -> Response:
    """Return how many tokens of a prompt each target would serve from its cache, the most first."""
    answer = _api(request).questions.match(await request.body())
    return encoded_response(answer if isinstance(answer, bytes) else await answer)


@index_routes.post("/query", openapi_extra=json_body(QueryBody), responses=errors(400, 404))
async def query(request: Request) -> Response:
    """Return how many tokens of a token sequence each instance holds, including its last block."""
    return encoded_response(_api(request).questions.query(await request.body()))


@index_routes.post("/query_by_hash", openapi_extra=json_body(HashQueryBody), responses=errors(400, 404))
async def query_by_hash(request: Request) -> Response:
    """Return how many tokens each instance holds of a prefix that is given by its prefix hashes."""
    return encoded_response(_api(request).questions.query_by_hash(await request.body()))


def workers_report(indexer: Indexer) -> list[dict[str, Any]]:
    """Return every registered worker with its ranks: streams, sequence numbers, and blocks by tier."""
    workers: dict[tuple[str, str, str], dict[str, Any]] = {}
    for registration in indexer.registered():
        target = registration.target
        report = indexer.report(target)
        if report is None:
            continue
        worker = workers.setdefault(
            (target.tenant, target.worker, target.model),
            {"worker": target.worker, "model": target.model, "tenant": target.tenant, "ranks": []},
        )
        worker["ranks"].append(_rank_report(report))
    return list(workers.values())


def publishers_report(indexer: Indexer) -> list[dict[str, Any]]:
    """Return the publishers that connected to the index, and the target that each one's messages are credited to."""
    return [
        {
            "endpoint": each.endpoint,
            "topic": each.topic,
            "key": each.identity or None,
            "address": each.address,
            "dp_rank": each.dp_rank,
            "worker": each.target and indexer.names.get(each.target.worker),
            "model": each.target and each.target.model,
            "problem": each.problem,
            "messages": each.messages,
            "seconds_since_message": time.time() - each.received_at,
        }
        for each in indexer.publishers()
    ]


def _registration(body: RegisterBody) -> Registration:
    instance, model, rank = str(body.instance_id), one_of(body, "modelname", "model_name"), body.dp_rank or 0
    salt = body.additionalsalt or body.additional_salt or None
    required = {"instance_id": instance, "modelname": model, "tenant_id": body.tenant_id, "endpoint": body.endpoint}
    for name, value in (required | {"lora_name": body.lora_name, "additionalsalt": salt}).items():
        if not value and name in required:
            raise RequestError(f"{name} is empty. Send a non-empty string.", param=name)
        if value is not None and len(value) > _LONGEST_NAME:
            raise RequestError(f"{name} has {len(value)} characters. Send at most {_LONGEST_NAME}.", param=name)
    return Registration(
        Target(instance, rank, model, body.tenant_id),
        EventSource(rank, body.endpoint, body.replay_endpoint or None, body.topic, body.curve_server_key),
        body.type,
        body.block_size,
        body.lora_name or None,
        additional_salt=salt,
    )


def _selects(body: UnregisterBody, target: Target) -> bool:
    every_tenant = body.tenant_id is None and body.model_name is not None
    return (
        target.worker == str(body.instance_id)
        and (every_tenant or target.tenant == (body.tenant_id or DEFAULT_TENANT))
        and (body.modelname or body.model_name) in (None, target.model)
        and body.dp_rank in (None, target.dp_rank)
    )


def _rank_report(report: TargetReport) -> dict[str, Any]:
    registration, stream, holdings = report.registration, report.stream, report.holdings
    source = registration.source
    return {
        "dp_rank": registration.target.dp_rank,
        "engine": registration.engine,
        "endpoint": source and source.endpoint,
        "replay_endpoint": source and source.replay_endpoint,
        "topic": source and source.topic,
        "adapter": registration.adapter,
        "additional_salt": registration.additional_salt,
        "block_sizes": sorted(holdings.block_sizes) or ([registration.block_size] if registration.block_size else []),
        "state": stream.state if stream else ("connecting" if source else "no stream"),
        "last_seq": stream.last_seq if stream else None,
        "pending_batches": stream.pending if stream else 0,
        "lag_seconds": stream.lag if stream else None,
        "seconds_since_event": time.time() - stream.received_at if stream and stream.received_at else None,
        "seconds_since_confirmed": stream.confirmed if stream else None,
        "batches": msgspec.to_builtins(stream.sequence) if stream else None,
        "unreadable": msgspec.to_builtins(stream.unreadable) if stream else None,
        "blocks": {tier.name.lower(): holdings.blocks[tier] for tier in Tier},
        "orphans": holdings.orphans,
        "counters": msgspec.to_builtins(holdings.counters),
    }


_service_routes = APIRouter()


@_service_routes.get("/", include_in_schema=False)
async def start() -> Response:
    return RedirectResponse("docs")


@_service_routes.get("/workers")
async def workers(request: Request) -> dict[str, Any]:
    """Return every registered target with its stream and its blocks, and the publishers that connected."""
    indexer = _api(request).indexer
    return {"workers": workers_report(indexer), "publishers": publishers_report(indexer)}


@_service_routes.get("/health")
async def health() -> dict[str, str]:
    """Return 200 while the process serves, with its version."""
    return {"status": "ok", **build_info()}


@_service_routes.get("/metrics")
async def metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(generate_latest(request.app.state.metrics), media_type=CONTENT_TYPE_LATEST)


def indexer_app(indexer: Indexer, questions: Questions, admit: Admit, token: str = "") -> FastAPI:
    """Return the application. The caller starts and stops the indexer, and limits the size of bodies."""
    app = FastAPI(title="kvrouter indexer", docs_url=None, redoc_url=None)
    app.state.index, app.state.token = IndexApi(indexer, questions, admit), token
    for shared in (index_routes, _service_routes, api_page_routes):  # include_router would copy each route
        app.router.routes += shared.routes
    add_error_handlers(app)
    app.state.metrics = CollectorRegistry()
    app.state.metrics.register(IndexCollector(indexer))
    add_process_metrics(app.state.metrics)
    return app
