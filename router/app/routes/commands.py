"""Routes by which operators command engines. They require the admin token.

- `POST /v1/load_lora_adapter` with `{"lora_name", "lora_path", "model"?, "workers"?: [URL, …], …}` loads an adapter.
- `POST /v1/unload_lora_adapter` with `{"lora_name", "model"?, "workers"?}` unloads an adapter.
- `POST /sleep?level=1&mode=wait` and `POST /wake_up` have the parameters of vLLM's routes, and `worker` or `model`.
- `POST /reset_prefix_cache`, or `/flush_cache`, resets the cache of every worker.

A command is for the named workers, else for all workers of a model. The router reads `model` and `workers` of a body,
and forwards all other fields to the engines, vLLM or SGLang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import aiohttp
import msgspec
from fastapi import APIRouter, Depends, Query, Request
from starlette.responses import JSONResponse

from http_api.errors import RequestError
from http_api.openapi import errors, json_body
from http_api.routes import token_check
from router.apis.fields import kind_of, optional_string
from router.app.services import Services
from router.fleet.discovery import Engine
from router.fleet.fleet import Fleet
from router.fleet.prober import Prober
from router.fleet.worker import Worker
from router.fleet.worker_commands import CommandResult, SleepMode, put_to_sleep, wake
from router.http.client import connection_problem


def chosen(fleet: Fleet, named: Sequence[object]) -> list[Worker]:
    """Return the workers with these URLs or names. Raises RequestError (404) for an unknown one."""
    return [_find(fleet, each) for each in named]


def serving(fleet: Fleet, model: str) -> list[Worker]:
    """Return the workers that serve a base model and answer. Raises RequestError (503) if no worker does."""
    workers = [worker for worker in fleet.workers if worker.up and model in worker.models()]
    if not workers:
        raise RequestError(
            f"No worker of model {model!r} answers. Try again later.",
            status=503,
            type="service_unavailable",
            code="no_worker_available",
        )
    return workers


def base_model(fleet: Fleet, name: str | None) -> str:
    """Return a name's base model; for None, the only model. Raises RequestError if that is unknown."""
    models = sorted({model for worker in fleet.workers for model in worker.models()})
    if name is not None:
        model = fleet.model_of(fleet.aliases.get(name, name))
        if model is None:
            raise RequestError(
                f"The model {name!r} does not exist. Send one of: {', '.join(models)}.",
                status=404,
                type="not_found_error",
                param="model",
                code="model_not_found",
            )
        return model
    if len(models) != 1:
        raise RequestError(
            f"The workers serve {', '.join(models) or 'no model yet'}. Send the name of one in model.",
            param="model",
        )
    return models[0]


def report(results: Sequence[CommandResult], code: str) -> tuple[int, dict[str, Any]]:
    """Return the status and the fields of an answer with the results of a command. `code` is the code of an error."""
    fields: dict[str, Any] = {
        "workers": [{"worker": each.worker.name, "status": each.status, "message": each.message} for each in results]
    }
    failed = [each for each in results if not each.succeeded]
    if not failed:
        return 200, fields
    message = f"{len(failed)} of {len(results)} workers failed; {failed[0].worker.name}: {failed[0].message}"
    error = {"message": message, "type": "upstream_error", "param": None, "code": code}
    return 502, {"error": error, **fields}


def _find(fleet: Fleet, url: object) -> Worker:
    worker = fleet.find(url) if isinstance(url, str) else None
    if worker is None:
        raise RequestError(
            f"workers: there is no worker {url!r}. GET /workers lists them.",
            status=404,
            type="not_found_error",
            param="workers",
        )
    return worker


class LoadBody(msgspec.Struct):
    """An adapter to load."""

    lora_name: str
    lora_path: str
    model: str | None = None
    workers: list[str] | None = None


class UnloadBody(msgspec.Struct):
    """An adapter to unload."""

    lora_name: str
    model: str | None = None
    workers: list[str] | None = None


def adapter_routes(services: Services) -> APIRouter:
    """Return the routes that load and unload adapters."""
    routes = APIRouter()
    fleet, adapters = services.fleet, services.adapters

    @routes.post(
        "/v1/load_lora_adapter", openapi_extra=json_body(LoadBody), responses=errors(400, 401, 403, 404, 502, 503)
    )
    async def load(request: Request) -> JSONResponse:
        """Load a LoRA adapter. The answer has the result of each worker; its status is 200 if all succeeded."""
        asked = _Asked(fleet, await request.body(), ("lora_name", "lora_path"))
        results = await adapters.load(asked.workers, asked.body, None if asked.chosen else asked.model)
        return await _answer(services.prober, asked.body["lora_name"], results)

    @routes.post(
        "/v1/unload_lora_adapter", openapi_extra=json_body(UnloadBody), responses=errors(400, 401, 403, 404, 502, 503)
    )
    async def unload(request: Request) -> JSONResponse:
        """Unload a LoRA adapter. The answer has the result of each worker; its status is 200 if all succeeded."""
        asked = _Asked(fleet, await request.body(), ("lora_name",))
        results = await adapters.unload(asked.workers, asked.body)
        return await _answer(services.prober, asked.body["lora_name"], results)

    return routes


class _Asked:
    """A parsed command for adapters. `chosen`: the client named its workers. Raises RequestError with the field."""

    def __init__(self, fleet: Fleet, data: bytes, wanted: tuple[str, ...]) -> None:
        try:
            body = msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RequestError(f'The body is no JSON object: {error}. Send {{"lora_name": "…"}}.') from error
        for field in wanted:
            if optional_string(body.get(field), field) is None:
                raise RequestError(f"{field} is missing. Send a string that is not empty.", param=field)
        name, urls = optional_string(body.pop("model", None), "model"), body.pop("workers", None)
        if urls is not None and (not isinstance(urls, list) or not urls):
            raise RequestError(f"workers is {kind_of(urls)}. Send a list of URLs, or leave it out.", param="workers")
        self.body = body
        self.chosen = urls is not None
        self.model: str | None = None
        if urls is not None:
            self.workers = chosen(fleet, urls)
            return
        self.model = base_model(fleet, name)
        self.workers = serving(fleet, self.model)


async def _answer(prober: Prober, name: str, results: Sequence[CommandResult]) -> JSONResponse:
    for each in results:
        if each.succeeded:
            await prober.probe(each.worker)  # its list of models has changed
    status, fields = report(results, "adapter")
    return JSONResponse({"lora_name": name, **fields}, status)


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


_VLLM_PATH, _SGLANG_PATH = "/reset_prefix_cache", "/flush_cache"
_TIMEOUT = aiohttp.ClientTimeout(total=10)


def cache_routes(services: Services) -> APIRouter:
    """Return the route that resets caches. It requires the admin token."""
    routes = APIRouter(dependencies=[Depends(token_check(services.settings.server.token))])

    @routes.post("/flush_cache", include_in_schema=False)
    @routes.post("/reset_prefix_cache", responses=errors(401))
    async def reset_prefix_cache() -> dict[str, Any]:
        """Reset the cache of every worker, and drop the workers' blocks from the router's state."""
        workers = services.fleet.workers
        statuses = await asyncio.gather(*(_reset(services, worker) for worker in workers))
        return {"workers": dict(zip((worker.name for worker in workers), statuses, strict=True))}

    return routes


async def _reset(services: Services, worker: Worker) -> str:
    is_sglang = worker.description is not None and worker.description.engine is Engine.SGLANG
    path = _SGLANG_PATH if is_sglang else _VLLM_PATH
    try:
        async with services.session.post(
            f"{worker.url}{path}", headers=worker.key.headers, timeout=_TIMEOUT
        ) as response:
            worker.key.record_status(path, response.status)
            if response.status != 200:
                return f"refused with status {response.status}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return connection_problem(error)
    services.routing.placement.forget(worker)
    return "reset"
