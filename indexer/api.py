"""The index over HTTP, in the shape of Mooncake's RFC 1403: its questions, and besides

`POST /register`    follow a stream          `POST /unregister`   forget it
`GET  /dump`        everything, for another indexer to begin with
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from secrets import compare_digest
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException

from http_api.errors import RequestError, named_first
from http_api.openapi import errors, json_body
from http_api.responses import json_response, refusal
from indexer.holdings import Target
from indexer.indexer import Indexer, Registration, TargetReport
from indexer.queries import DEFAULT_TENANT
from indexer.question_bodies import decoded
from indexer.question_routes import question_routes
from indexer.questions import Questions
from kvevents import EventSource, Tier

# A registration that may be followed, with addresses in the place of names. Raises ValueError, the field first.
Admit = Callable[[Registration], Awaitable[Registration]]

_LONGEST_NAME = 512  # characters


class RegisterBody(msgspec.Struct, forbid_unknown_fields=False):
    """`POST /register`: one DP rank's stream."""

    endpoint: str
    modelname: str
    instance_id: str
    type: Literal["vLLM", "SGLang"] = "vLLM"
    replay_endpoint: str | None = None
    block_size: int | None = None
    dp_rank: int = 0
    topic: str = ""
    lora_name: str | None = None
    tenant_id: str = DEFAULT_TENANT
    curve_server_key: str | None = None


class UnregisterBody(msgspec.Struct):
    """`POST /unregister`: an instance, or the part of it that the other fields name."""

    instance_id: str
    modelname: str | None = None
    dp_rank: int | None = None
    tenant_id: str = DEFAULT_TENANT


def index_routes(indexer: Indexer, questions: Questions, admit: Admit, token: str) -> APIRouter:
    """The routes of the index API; those that change something want the token, unless it is empty."""
    routes = APIRouter()
    protected = [Depends(token_check(token))]

    @routes.post(
        "/register",
        status_code=201,
        dependencies=protected,
        openapi_extra=json_body(RegisterBody),
        responses=errors(400, 401),
    )
    async def register(request: Request) -> Response:
        """Follow the event stream of one DP rank. The same registration twice does nothing; another starts it anew."""
        body = decoded(await request.body(), RegisterBody)
        registration = _registration(body)
        try:
            indexer.register(await admit(registration))
        except ValueError as error:
            raise RequestError(str(error), param=named_first(error)) from error
        return json_response({"status": "registered", "instance_id": body.instance_id, "dp_rank": body.dp_rank}, 201)

    @routes.post(
        "/unregister",
        dependencies=protected,
        openapi_extra=json_body(UnregisterBody),
        responses=errors(400, 401, 404),
    )
    async def unregister(request: Request) -> Response:
        """Follow the streams of an instance, or of the part that is named, no longer, and forget what they told."""
        body = decoded(await request.body(), UnregisterBody)
        targets = [known.target for known in indexer.registered() if _named(known.target, body)]
        if not targets:
            raise RequestError(
                f"no registered target has instance_id {body.instance_id!r} in tenant {body.tenant_id!r}",
                status=404,
                type="not_found_error",
                param="instance_id",
            )
        indexer.unregister(targets)
        return json_response({"status": "unregistered", "instance_id": body.instance_id, "targets": len(targets)})

    @routes.get("/dump", response_class=StreamingResponse, responses={200: {"content": {"application/x-ndjson": {}}}})
    async def dump() -> StreamingResponse:
        """All that another indexer needs to begin warm, as lines of JSON."""
        return StreamingResponse(indexer.dump(), media_type="application/x-ndjson")

    routes.routes += question_routes(questions).routes
    return routes


def token_check(token: str) -> Callable[[Request], None]:
    """A dependency that refuses requests without `Authorization: Bearer <token>`; an empty token lets all through."""

    def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if token and not (scheme.lower() == "bearer" and compare_digest(given.strip().encode(), token.encode())):
            raise RequestError(
                "This changes the state of the service. Send Authorization: Bearer with the token of server.token.",
                status=401,
                type="authentication_error",
                param="authorization",
            )

    return check


def workers_report(indexer: Indexer) -> list[dict[str, Any]]:
    """Every registered worker with its ranks: streams, sequence numbers, and blocks by tier."""
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
        worker["ranks"].append(_rank(report))
    return list(workers.values())


def add_error_handlers(app: FastAPI) -> None:
    """Answer RequestError with OpenAI's error body."""

    @app.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def unusable(request: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        refusal = RequestError(f"{name}: {first['msg']}. Send it in the {first['loc'][0]}.", param=name)
        return await refuse(request, refusal)

    @app.exception_handler(HTTPException)
    async def nothing_here(request: Request, error: HTTPException) -> Response:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        refusal = RequestError(f"{request.method} here: {error.detail}.", status=error.status_code, type=kind)
        return await refuse(request, refusal)


def _registration(body: RegisterBody) -> Registration:
    for name in ("instance_id", "modelname", "tenant_id", "endpoint", "lora_name"):
        value = getattr(body, name)
        if not value and value is not None:
            raise RequestError(f"{name} is empty. Send a string that is not.", param=name)
        if value is not None and len(value) > _LONGEST_NAME:
            raise RequestError(f"{name} has {len(value)} characters. Send {_LONGEST_NAME} at most.", param=name)
    return Registration(
        Target(body.instance_id, body.dp_rank, body.modelname, body.tenant_id),
        EventSource(body.dp_rank, body.endpoint, body.replay_endpoint, body.topic, body.curve_server_key),
        body.type,
        body.block_size,
        body.lora_name,
    )


def _named(target: Target, body: UnregisterBody) -> bool:
    return (
        target.worker == body.instance_id
        and target.tenant == body.tenant_id
        and body.modelname in (None, target.model)
        and body.dp_rank in (None, target.dp_rank)
    )


def _rank(report: TargetReport) -> dict[str, Any]:
    registration, stream, holdings = report.registration, report.stream, report.holdings
    source = registration.source
    return {
        "dp_rank": registration.target.dp_rank,
        "engine": registration.engine,
        "endpoint": source and source.endpoint,
        "replay_endpoint": source and source.replay_endpoint,
        "topic": source and source.topic,
        "adapter": registration.adapter,
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
