"""What a worker answers that says it is SGLang: what it is, and that a request is given up."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from simulator.worker.worker import SimulatedWorker
from worker.zmq_publisher import ZmqEventPublisher

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
        "kv_events": _kv_events(worker),
    }


@routes.post("/abort_request")
async def abort_request(body: AbortRequest, request: Request) -> Response:
    worker: SimulatedWorker = request.app.state.worker
    for rid in [body.rid] if isinstance(body.rid, str) else body.rid:
        worker.completions.abort(rid)
    return Response()


def _kv_events(worker: SimulatedWorker) -> dict[str, Any] | None:
    """The stream of rank 0; those of the others are on the ports that follow."""
    settings, publisher = worker.settings, worker.reporters[0].publisher
    if settings.kv_events is None or not isinstance(publisher, ZmqEventPublisher):
        return None
    return {
        **msgspec.structs.asdict(settings.kv_events),
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        "block_size": settings.block_size,
        "dp_size": settings.dp_size,
    }
