"""The router's state: `/health`, `/ready` and `/metrics`."""

from __future__ import annotations

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import JSONResponse, PlainTextResponse

from router.app.services import Services


def status_routes(services: Services) -> APIRouter:
    """Return the routes of the router's state, which require no token."""
    routes = APIRouter()
    fleet, admission = services.fleet, services.admission

    @routes.get("/health")
    async def health() -> Response:
        """Report the number of workers that answer, the queue's length, how prompts are tokenized, and the findings."""
        up = sum(worker.up for worker in fleet.workers)
        report = {
            "status": "ok" if up else "no worker answers",
            "workers": len(fleet.workers),
            "workers_up": up,
            "queue": {reason.value: waiting for reason, waiting in admission.waiting_for().items()},
            "tokenizers": services.tokenizers.states(),
            "findings": services.observability.findings(),
            **services.observability.about.identity,
        }
        return JSONResponse(report)

    @routes.get("/ready")
    async def ready() -> Response:
        """Respond with 200 if a worker answers and the index has caught up, else with 503."""
        problem = services.readiness.problem()
        return JSONResponse({"status": problem or "ready"}, 503 if problem else 200)

    @routes.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return Prometheus metrics."""
        return Response(generate_latest(services.observability.registry), media_type=CONTENT_TYPE_LATEST)

    return routes
