"""Routes that load and unload LoRA adapters, on all workers of a model or on named ones. They require the admin token.

`POST /v1/load_lora_adapter`      {"lora_name", "lora_path", "model"?, "workers"?: [URL, …], …}
`POST /v1/unload_lora_adapter`    {"lora_name", "model"?, "workers"?}

The router reads `model` and `workers`. All other fields are forwarded to the engines, vLLM or SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse

from http_api.errors import RequestError
from http_api.openapi import errors, json_body
from router.apis.fields import kind_of, optional_string
from router.app.routes.chosen_workers import base_model, chosen, report, serving
from router.app.services import Services
from router.fleet.fleet import Fleet
from router.fleet.prober import Prober
from router.fleet.worker_commands import CommandResult


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
    """A parsed command for adapters. Raises RequestError, which names the invalid field.

    - `body`: the body for engines.
    - `chosen`: the client named the workers.
    - `model`: the base model; None if the client named the workers.
    - `workers`: the workers that receive the command.
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
