"""`POST /reset_prefix_cache`: resets the cache of every worker."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from fastapi import APIRouter, Depends

from http_api.openapi import errors
from http_api.requests import token_check
from router.app.services import Services
from router.fleet.worker import Worker
from router.http.client import connection_problem

_PATH = "/reset_prefix_cache"
_TIMEOUT = aiohttp.ClientTimeout(total=10)


def cache_routes(services: Services) -> APIRouter:
    """Return the route that resets caches. It requires the admin token."""
    routes = APIRouter(dependencies=[Depends(token_check(services.settings.server.token))])

    @routes.post("/reset_prefix_cache", responses=errors(401))
    async def reset_prefix_cache() -> dict[str, Any]:
        """Reset the cache of every worker, and drop the workers' blocks from the router's state."""
        workers = services.fleet.workers
        statuses = await asyncio.gather(*(_reset(services, worker) for worker in workers))
        return {"workers": dict(zip((worker.name for worker in workers), statuses, strict=True))}

    return routes


async def _reset(services: Services, worker: Worker) -> str:
    try:
        async with services.session.post(
            f"{worker.url}{_PATH}", headers=worker.key.headers, timeout=_TIMEOUT
        ) as response:
            worker.key.record_status(_PATH, response.status)
            if response.status != 200:
                return f"refused with status {response.status}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return connection_problem(error)
    services.routing.placement.forget(worker)
    return "reset"
