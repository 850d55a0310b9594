"""LoRA adapters over HTTP, on all workers of a model or on some. They want the operator's token.

`POST /v1/load_lora_adapter`      {"lora_name", "lora_path", "model"?, "workers"?: [URL, …], …}
`POST /v1/unload_lora_adapter`    {"lora_name", "model"?, "workers"?}

`model` and `workers` are for the router; all else goes to the engines, vLLM or SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from indexer.errors import RequestError
from indexer.openapi import errors, json_body
from router.apis.fields import kind_of, optional_string
from router.fleet.adapters import Told
from router.fleet.fleet import Fleet
from router.fleet.worker import Worker
from router.services import Services


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
    """The routes that load and unload adapters."""
    routes = APIRouter()
    fleet, adapters = services.fleet, services.adapters

    @routes.post(
        "/v1/load_lora_adapter", openapi_extra=json_body(LoadBody), responses=errors(400, 401, 403, 404, 502, 503)
    )
    async def load(request: Request) -> JSONResponse:
        """Load a LoRA adapter. The answer tells of each worker; it is 200 when it went well at all of them."""
        asked = _Asked(fleet, await request.body(), ("lora_name", "lora_path"))
        told = await adapters.load(asked.workers, asked.body, None if asked.chosen else asked.model)
        return await _answer(fleet, asked.body["lora_name"], told)

    @routes.post(
        "/v1/unload_lora_adapter", openapi_extra=json_body(UnloadBody), responses=errors(400, 401, 403, 404, 502, 503)
    )
    async def unload(request: Request) -> JSONResponse:
        """Unload one. The same answer."""
        asked = _Asked(fleet, await request.body(), ("lora_name",))
        told = await adapters.unload(asked.workers, asked.body)
        return await _answer(fleet, asked.body["lora_name"], told)

    return routes


class _Asked:
    """What is asked: the body for engines, the base model, the workers, and whether they were chosen by the client.

    Raises RequestError naming the field at fault.
    """

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
            self.workers: Sequence[Worker] = [_find(fleet, url) for url in urls]
            return
        self.model = _base_model(fleet, name)
        self.workers = [worker for worker in fleet.workers if worker.up and self.model in worker.models()]
        if not self.workers:
            raise RequestError(
                f"No worker of model {self.model!r} answers. Try again later.",
                status=503,
                type="service_unavailable",
                code="no_worker_available",
            )


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


def _base_model(fleet: Fleet, name: str | None) -> str:
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
            f"The workers serve {', '.join(models) or 'no model yet'}. Say in model which one the adapter is for.",
            param="model",
        )
    return models[0]


async def _answer(fleet: Fleet, name: str, told: Sequence[Told]) -> JSONResponse:
    for each in told:
        if each.well:
            await fleet.probe(each.worker)  # its models are others now
    failed = [each for each in told if not each.well]
    body: dict[str, Any] = {
        "lora_name": name,
        "workers": [{"worker": each.worker.name, "status": each.status, "message": each.message} for each in told],
    }
    if not failed:
        return JSONResponse(body)
    message = f"{len(failed)} of {len(told)} workers failed; {failed[0].worker.name}: {failed[0].message}"
    error = {"message": message, "type": "upstream_error", "param": None, "code": "adapter"}
    return JSONResponse({"error": error, **body}, 502)
