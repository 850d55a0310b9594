"""Routes of Dynamo's selection service, below `/selection`: the choice for programs that send requests themselves.

Errors have Dynamo's form, `{"error": "…"}`. Routes that reserve, or change workers, require the admin token.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute

from http_api.errors import RequestError
from http_api.openapi import schema_body
from http_api.routes import check_token, json_response
from router.app.services import services_of
from router.reservations.selection_service import SelectionService

PREFIX = "/selection"
# Maximum size of a body, as in Dynamo.
_MOST_BYTES = 8 * 2**20
_BODY = schema_body({"type": "object"})
_OK = {"status": "ok"}


class _Route(APIRoute):
    """A route whose errors have Dynamo's form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handler(request)
            except RequestError as error:
                body: dict[str, Any] = {"error": error.message}
                if error.status == 429 and error.retry_after is not None:
                    body["details"] = {"retry_after": error.retry_after}
                response = json_response(body, error.status)
                if error.retry_after is not None:
                    response.headers["retry-after"] = str(error.retry_after)
                return response

        return answer


routes = APIRouter(prefix=PREFIX, route_class=_Route)
_CHANGES = [Depends(check_token)]


def _service(request: Request) -> SelectionService:
    return services_of(request).selection


@routes.get("/health")
async def health() -> Response:
    """Answer while the router runs."""
    return json_response(_OK)


@routes.get("/ready")
async def ready(request: Request) -> Response:
    """Return whether any worker may be chosen."""
    found = _service(request).workers.ready()
    return json_response(found, 200 if found["ready"] else 503)


@routes.get("/workers")
async def workers(request: Request, model_name: str | None = None, routing_group: str | None = None) -> Response:
    """List all workers."""
    return json_response(_service(request).workers.listed(model_name, routing_group))


@routes.get("/loads")
async def loads(request: Request, model_name: str | None = None, routing_group: str | None = None) -> Response:
    """Return the load of each worker, by model and routing group."""
    return json_response(_service(request).loads(model_name, routing_group))


def _answer(
    path: str, call: Callable[[SelectionService, bytes], Awaitable[Any]], status: int = 200, *, change: bool = False
) -> None:
    """Add a route that answers a body."""

    async def endpoint(request: Request) -> Response:
        return json_response(await call(_service(request), await _body(request)), status)

    endpoint.__doc__ = call.__doc__
    endpoint.__name__ = f"selection_{call.__name__}"
    dependencies = _CHANGES if change else []
    routes.add_api_route(path, endpoint, methods=["POST"], openapi_extra=_BODY, dependencies=dependencies)


_answer("/select", SelectionService.select)
_answer("/overlap_scores", SelectionService.overlap_scores)
_answer("/potential_loads", SelectionService.potential_loads)
_answer("/select_and_reserve", SelectionService.select_and_reserve, change=True)
_answer("/reservations", SelectionService.create_reservation, 201, change=True)


@routes.post("/workers", openapi_extra=_BODY, dependencies=_CHANGES)
async def upsert_worker(request: Request) -> Response:
    """Add a worker, or replace it."""
    body = await _body(request)
    return json_response(await _service(request).workers.upsert(body), 201)


@routes.patch("/workers/{worker_id}", openapi_extra=_BODY, dependencies=_CHANGES)
async def patch_worker(worker_id: str, request: Request) -> Response:
    """Replace the given fields of a worker."""
    return json_response(await _service(request).workers.patch(_number(worker_id), await _body(request)))


@routes.delete("/workers/{worker_id}", dependencies=_CHANGES)
async def delete_worker(worker_id: str, request: Request) -> Response:
    """Remove a worker, and end its reservations."""
    return json_response(await _service(request).workers.delete(_number(worker_id)))


@routes.post("/reservations/{id}/prefill_complete", dependencies=_CHANGES)
async def prefill_complete(id: str, request: Request) -> Response:
    """End the prefill of a reservation."""
    await _service(request).prefill_complete(id)
    return json_response(_OK)


@routes.post("/reservations/{id}/output_block", dependencies=_CHANGES)
async def output_block(id: str, request: Request) -> Response:
    """Report one more block of an answer."""
    _service(request).add_output_block(id, await _body(request))
    return json_response(_OK)


@routes.delete("/reservations/{id}", dependencies=_CHANGES)
async def free_reservation(id: str, request: Request) -> Response:
    """Release a reservation."""
    await _service(request).free_reservation(id)
    return json_response(_OK)


async def _body(request: Request) -> bytes:
    body = await request.body()
    if len(body) > _MOST_BYTES:
        raise RequestError(f"The body is larger than {_MOST_BYTES} bytes.", status=413)
    return body


def _number(id: str) -> int:
    if not (id.isascii() and id.isdecimal() and len(id) <= 20):
        raise RequestError(f"Invalid URL: Cannot parse `{id[:64]}` to a `u64`")
    return int(id)
