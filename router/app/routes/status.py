"""The router's state: `/health`, `/ready`, `/metrics`, the stream `/live`, its page `/ui`, and `/requests`."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse

from http_api.errors import RequestError
from http_api.openapi import errors
from http_api.routes import check_token
from router.app.services import services_of
from router.observability.advice import has_errors
from router.observability.fleet_snapshot import MAX_VIEWERS, FleetSnapshot
from router.observability.request_recorder import (
    DEFAULT_BLOCK_TOKENS,
    MAX_LISTENERS,
    OtherProcesses,
    Recording,
    recording_of,
)

_PAGE = (Path(__file__).parents[2] / "observability" / "page.html").read_text()
# The page loads nothing from other origins, and other pages cannot frame it.
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

routes = APIRouter()


@routes.get("/liveness", include_in_schema=False)
@routes.get("/health")
async def health(request: Request) -> Response:
    """Report the number of workers that answer, the queue's length, how prompts are tokenized, and the findings."""
    services = services_of(request)
    fleet = services.fleet
    up = Counter(str(worker.role) for worker in fleet.workers if worker.up)
    serves = any(worker.up for worker in fleet.generating)
    found = services.observability.findings()
    report = {
        "status": "no worker answers" if not serves else "degraded" if has_errors(found) else "ok",
        "workers": len(fleet.workers),
        "workers_up": up.total(),
        "workers_up_by_role": up,
        "queue": {reason.value: waiting for reason, waiting in services.admission.waiting_for().items()},
        "sessions": services.observability.sessions.report(),
        "tokenizers": services.tokenizers.states(),
        "ids_not_sent": services.tokenizer_source.ids_not_sent(),
        "findings": found,
        **services.observability.about.identity,
    }
    return JSONResponse(report)


@routes.get("/readiness", include_in_schema=False)
@routes.get("/ready")
async def ready(request: Request) -> Response:
    """Respond with 200 if a worker answers and the index has caught up, else with 503."""
    problem = services_of(request).readiness.problem()
    return JSONResponse({"status": problem or "ready"}, 503 if problem else 200)


@routes.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Return Prometheus metrics."""
    return Response(generate_latest(services_of(request).observability.registry), media_type=CONTENT_TYPE_LATEST)


@routes.get("/", include_in_schema=False)
async def start() -> RedirectResponse:
    return RedirectResponse("ui")  # not /ui: a proxy may add a prefix to the path


@routes.get("/ui", response_class=HTMLResponse)
async def ui() -> HTMLResponse:
    """Return the page that shows the current state of the fleet."""
    return HTMLResponse(_PAGE, headers=_PAGE_HEADERS)


@routes.get(
    "/live",
    dependencies=[Depends(check_token)],
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}}, **errors(401, 503)},
)
async def live(request: Request) -> StreamingResponse:
    """Stream the state of the fleet as server-sent events: first the whole state, then each second's changes."""
    snapshot = services_of(request).observability.snapshot
    if snapshot.full:
        message = f"{MAX_VIEWERS} viewers are connected already. Close one."
        raise RequestError(message, status=503, type="service_unavailable")
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(_events(snapshot), media_type="text/event-stream", headers=headers)


@routes.get(
    "/requests",
    dependencies=[Depends(check_token)],
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {}}}, **errors(400, 401, 503)},
)
async def requests(
    request: Request,
    block_tokens: Annotated[int, Query(ge=16, le=65_536)] = DEFAULT_BLOCK_TOKENS,
) -> StreamingResponse:
    """Stream a trace of all later requests in Mooncake's format. It has lengths and hashes, never text."""
    services = services_of(request)
    recorder, worker_processes = services.observability.recorder, services.worker_processes
    if recorder.full:
        message = f"{MAX_LISTENERS} recordings are running already. End one of them."
        raise RequestError(message, status=503, type="service_unavailable")
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if (recording := recording_of(request, worker_processes)) is not None:
        lines = recorder.lines(recording)
    else:
        others = OtherProcesses(worker_processes, services.settings.server.token) if worker_processes else None
        lines = recorder.lines(Recording(block_tokens), others.read if others else None)
    return StreamingResponse(lines, media_type="application/x-ndjson", headers=headers)


async def _events(snapshot: FleetSnapshot) -> AsyncIterator[bytes]:
    async for update in snapshot.updates():
        yield b"data: %b\n\n" % msgspec.json.encode(update)
