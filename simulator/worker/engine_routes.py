"""Behaviour that differs between engines: the check of the API key, and the routes of SGLang."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from secrets import compare_digest
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.responses import JSONResponse

from kvevents.endpoints import bracketed, parse_endpoint
from simulator.worker.worker import SimulatedWorker
from worker.zmq_publisher import ZmqEventPublisher

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class KeyMiddleware:
    """A middleware that answers 401 without the API key: for vLLM below /v1, for SGLang except /health and /metrics."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]], api_key: str, sglang: bool) -> None:
        self._app = app
        self._expected = api_key.encode()
        self._sglang = sglang

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        guarded = scope["type"] == "http" and scope["method"] != "OPTIONS" and self._guards(scope["path"])
        if guarded and not self._opens(dict(scope["headers"]).get(b"authorization", b"")):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _guards(self, path: str) -> bool:
        return not path.startswith(("/health", "/metrics")) if self._sglang else path.startswith("/v1")

    def _opens(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and compare_digest(key, self._expected)


DEFAULT_BOOTSTRAP_PORT = 8998

routes = APIRouter()


class AbortRequest(BaseModel):
    """The body of POST /abort_request."""

    rid: str | list[str]


@routes.get("/server_info")
async def server_info(request: Request) -> dict[str, Any]:
    worker: SimulatedWorker = request.app.state.worker
    settings = worker.settings
    port = worker.disaggregated.bootstrap_port if worker.disaggregated else None
    return {
        "model_path": settings.tokenizer,
        "served_model_name": settings.model,
        "tp_size": 1,
        "dp_size": settings.dp_size,
        "page_size": settings.block_size,
        "disaggregation_mode": settings.role or "null",
        "disaggregation_bootstrap_port": port or DEFAULT_BOOTSTRAP_PORT,
        "kv_events_config": _publisher_flag(worker),
        "kv_events": _kv_events(worker),
    }


@routes.post("/abort_request")
async def abort_request(body: AbortRequest, request: Request) -> Response:
    worker: SimulatedWorker = request.app.state.worker
    for rid in [body.rid] if isinstance(body.rid, str) else body.rid:
        worker.completions.abort(rid)
    return Response()


def _publisher_flag(worker: SimulatedWorker) -> str | None:
    """Return the text of `--kv-events-config`, with the ports that are bound."""
    settings, publisher = worker.settings, worker.reporters[0].publisher
    config = settings.kv_events
    if config is None:
        return None
    bound: dict[str, Any] = {}
    if isinstance(publisher, ZmqEventPublisher):
        bound = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        bound["bind"] = not settings.connects
    return msgspec.json.encode(msgspec.structs.asdict(config) | bound).decode()


def _kv_events(worker: SimulatedWorker) -> dict[str, Any] | None:
    """Return the event stream of rank 0; None if it has no TCP port. Other ranks use the following ports."""
    settings, publisher = worker.settings, worker.reporters[0].publisher
    if settings.kv_events is None or not isinstance(publisher, ZmqEventPublisher):
        return None
    endpoint, replay = parse_endpoint(publisher.endpoint), publisher.replay_endpoint
    if endpoint.port is None:
        return None
    described = {
        "publisher": settings.kv_events.publisher,
        "endpoint_host": bracketed(endpoint.address),
        "endpoint_port_base": endpoint.port,
        "topic": settings.kv_events.topic,
        "block_size": settings.block_size,
        "dp_size": settings.dp_size,
    }
    if replay is not None and (port := parse_endpoint(replay).port) is not None:
        described["replay_endpoint_port_base"] = port
    return described
