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
from router.app.services import Services

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


def selection_routes(services: Services) -> APIRouter:
    """Return the routes of the selection service."""
    service, routes = services.selection, APIRouter(prefix=PREFIX, route_class=_Route)
    changes = [Depends(check_token)]

    @routes.get("/health")
    async def health() -> Response:
        """Answer while the router runs."""
        return json_response(_OK)

    @routes.get("/ready")
    async def ready() -> Response:
        """Return whether any worker may be chosen."""
        found = service.workers.ready()
        return json_response(found, 200 if found["ready"] else 503)

    @routes.get("/workers")
    async def workers(model_name: str | None = None, routing_group: str | None = None) -> Response:
        """List all workers."""
        return json_response(service.workers.listed(model_name, routing_group))

    @routes.get("/loads")
    async def loads(model_name: str | None = None, routing_group: str | None = None) -> Response:
        """Return the load of each worker, by model and routing group."""
        return json_response(service.loads(model_name, routing_group))

    def answer(path: str, call: Callable[[bytes], Awaitable[Any]], status: int = 200, *, change: bool = False) -> None:
        """Add a route that answers a body."""

        async def endpoint(request: Request) -> Response:
            return json_response(await call(await _body(request)), status)

        endpoint.__doc__ = call.__doc__
        endpoint.__name__ = f"selection_{call.__name__}"
        routes.add_api_route(
            path, endpoint, methods=["POST"], openapi_extra=_BODY, dependencies=changes if change else []
        )

    answer("/select", service.select)
    answer("/overlap_scores", service.overlap_scores)
    answer("/potential_loads", service.potential_loads)
    answer("/select_and_reserve", service.select_and_reserve, change=True)
    answer("/reservations", service.create_reservation, 201, change=True)

    @routes.post("/workers", openapi_extra=_BODY, dependencies=changes)
    async def upsert_worker(request: Request) -> Response:
        """Add a worker, or replace it."""
        body = await _body(request)
        return json_response(await service.workers.upsert(body), 201)

    @routes.patch("/workers/{worker_id}", openapi_extra=_BODY, dependencies=changes)
    async def patch_worker(worker_id: str, request: Request) -> Response:
        """Replace the given fields of a worker."""
        return json_response(await service.workers.patch(_number(worker_id), await _body(request)))

    @routes.delete("/workers/{worker_id}", dependencies=changes)
    async def delete_worker(worker_id: str) -> Response:
        """Remove a worker, and end its reservations."""
        return json_response(await service.workers.delete(_number(worker_id)))

    @routes.post("/reservations/{id}/prefill_complete", dependencies=changes)
    async def prefill_complete(id: str) -> Response:
        """End the prefill of a reservation."""
        await service.prefill_complete(id)
        return json_response(_OK)

    @routes.post("/reservations/{id}/output_block", dependencies=changes)
    async def output_block(id: str, request: Request) -> Response:
        """Report one more block of an answer."""
        service.add_output_block(id, await _body(request))
        return json_response(_OK)

    @routes.delete("/reservations/{id}", dependencies=changes)
    async def free_reservation(id: str) -> Response:
        """Release a reservation."""
        await service.free_reservation(id)
        return json_response(_OK)

    return routes


async def _body(request: Request) -> bytes:
    body = await request.body()
    if len(body) > _MOST_BYTES:
        raise RequestError(f"The body is larger than {_MOST_BYTES} bytes.", status=413)
    return body


def _number(id: str) -> int:
    if not (id.isascii() and id.isdecimal() and len(id) <= 20):
        raise RequestError(f"Invalid URL: Cannot parse `{id[:64]}` to a `u64`")
    return int(id)
