"""Routes that put workers to sleep and wake them, with the fields of vLLM's routes. They require the admin token.

`POST /sleep?level=1&mode=wait` and `POST /wake_up` are for all workers of `model`, or for each `worker` (URL or name).
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse

from http_api.openapi import errors
from router.app.routes.chosen_workers import base_model, chosen, report, serving
from router.app.services import Services
from router.fleet.worker import Worker
from router.fleet.worker_commands import SleepMode, put_to_sleep, wake

_Workers = Annotated[tuple[str, ...], Query()]
_Level = Annotated[int, Query(ge=0, le=2)]


def sleep_routes(services: Services) -> APIRouter:
    """Return the routes that put workers to sleep and wake them."""
    routes = APIRouter()
    fleet, session = services.fleet, services.session

    def asked(worker: tuple[str, ...], model: str | None) -> list[Worker]:
        return chosen(fleet, worker) if worker else serving(fleet, base_model(fleet, model))

    @routes.post("/sleep", responses=errors(400, 401, 403, 404, 502, 503))
    async def sleep(
        worker: _Workers = (), model: str | None = None, level: _Level = 1, mode: SleepMode = "wait"
    ) -> JSONResponse:
        """Put workers to sleep: they receive no requests until they are woken. The answer has each worker's result."""
        status, fields = report(await put_to_sleep(fleet, session, asked(worker, model), level, mode), "sleep")
        return JSONResponse(fields, status)

    @routes.post("/wake_up", responses=errors(400, 401, 403, 404, 502, 503))
    async def wake_up(worker: _Workers = (), model: str | None = None) -> JSONResponse:
        """Wake workers that sleep. The answer has each worker's result."""
        status, fields = report(await wake(fleet, session, asked(worker, model)), "sleep")
        return JSONResponse(fields, status)

    return routes
