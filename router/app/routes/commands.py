"""Routes by which operators command engines. They require the admin token.

- `POST /v1/load_lora_adapter` with `{"lora_name", "lora_path", "model"?, "workers"?: [URL, …], …}` loads an adapter.
- `POST /v1/unload_lora_adapter` with `{"lora_name", "model"?, "workers"?}` unloads an adapter.
- The routes of `router/fleet/engine_commands.py` have `worker` and `model` in the query, to choose workers.

An adapter is for the named workers, else for all workers of a model. The router reads `model` and `workers` of the
body, and forwards all other fields to the engines, vLLM or SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse

from http_api.errors import RequestError
from http_api.openapi import errors, json_body
from http_api.routes import check_token
from router.apis.fields import kind_of, optional_string
from router.app.services import Services, services_of
from router.fleet.engine_commands import COMMANDS, MODES, Command, Parameters
from router.fleet.fleet import Fleet
from router.fleet.prober import Prober
from router.fleet.worker import Worker
from router.fleet.worker_commands import CommandResult


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
    """Return the status and the fields of an answer with the results of a command. `code` is the code of an error.

    The status is 200 if all workers succeeded, 207 if some did, and 502 if none did.
    """
    fields: dict[str, Any] = {"workers": [_entry(each) for each in results]}
    failed = [each for each in results if not each.succeeded]
    if not failed:
        return 200, fields
    first = failed[0]
    reason = first.message or f"it answered {first.status}"
    message = f"{len(failed)} of {len(results)} workers failed; {first.worker.name}: {reason}"
    error = {"message": message, "type": "upstream_error", "param": None, "code": code}
    return 502 if len(failed) == len(results) else 207, {"error": error, **fields}


def _entry(result: CommandResult) -> dict[str, Any]:
    entry = {
        "worker": result.worker.name,
        "url": result.worker.url,
        "status": result.status,
        "message": result.message,
    }
    return entry if result.answer is None else entry | {"answer": result.answer}


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


routes = APIRouter()


@routes.post("/v1/load_lora_adapter", openapi_extra=json_body(LoadBody), responses=errors(400, 401, 403, 404, 502, 503))
async def load(request: Request) -> JSONResponse:
    """Load a LoRA adapter. The answer has each worker's result: 200 if all succeeded, 207 if some did."""
    services = services_of(request)
    asked = _Asked(services.fleet, await request.body(), ("lora_name", "lora_path"))
    results = await services.adapters.load(asked.workers, asked.body, None if asked.chosen else asked.model)
    return await _answer(services.prober, asked.body["lora_name"], results)


@routes.post(
    "/v1/unload_lora_adapter", openapi_extra=json_body(UnloadBody), responses=errors(400, 401, 403, 404, 502, 503)
)
async def unload(request: Request) -> JSONResponse:
    """Unload a LoRA adapter. The answer has each worker's result: 200 if all succeeded, 207 if some did."""
    services = services_of(request)
    asked = _Asked(services.fleet, await request.body(), ("lora_name",))
    results = await services.adapters.unload(asked.workers, asked.body)
    return await _answer(services.prober, asked.body["lora_name"], results)


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


# Parameters of the query that choose workers. Others are for the engines.
_CHOOSING = ("worker", "model")
_QUERY = [
    {
        "name": "worker",
        "in": "query",
        "required": False,
        "schema": {"type": "array", "items": {"type": "string"}},
        "description": "URLs or names of workers, to restrict the call to them.",
    },
    {
        "name": "model",
        "in": "query",
        "required": False,
        "schema": {"type": "string"},
        "description": "A model, to restrict the call to its workers that answer.",
    },
]
_PARTLY: dict[int | str, dict[str, Any]] = {207: {"description": "Some workers failed."}}


class _Endpoint:
    """The endpoint of one command."""

    def __init__(self, command: Command) -> None:
        self._command = command

    async def answer(self, request: Request) -> JSONResponse:
        """Send the command to the chosen workers, and return their answers."""
        services, command = services_of(request), self._command
        parameters = _parameters(request, await request.body())
        workers = _chosen_by(services.fleet, request)
        results = await services.commands.run(command, workers, parameters)
        status, fields = report(results, command.names[0].strip("/"))
        if command.names[0] == "/loads":
            for worker, entry in zip(workers, fields["workers"], strict=True):
                entry["load"] = _requests_in_flight(services, worker)
        return JSONResponse(fields, status)


for command in COMMANDS:
    # Other commands are refused without a token by the auth gate.
    depends = [Depends(check_token)] if command.open_on_loopback else []
    for name in command.names:
        routes.add_api_route(
            name,
            _Endpoint(command).answer,
            methods=[command.method],
            name=name.strip("/"),
            summary=command.summary,
            description=f"{command.summary} The answer has the answer of each worker.",
            responses={**errors(400, 401, 403, 404, 502, 503), **_PARTLY},
            dependencies=depends,
            openapi_extra={"parameters": _QUERY},
        )


def _requests_in_flight(services: Services, worker: Worker) -> int:
    """Return the requests that this router and other routers have in flight at a worker."""
    elsewhere = services.routing.state.sharing.peer_load.in_flight(worker.url, worker.ranks())
    return len(worker.health.attempts) + elsewhere.total()


def _chosen_by(fleet: Fleet, request: Request) -> list[Worker]:
    """Return the workers that a request names, else those of its model, else all. Raises RequestError (404, 503)."""
    if named := request.query_params.getlist("worker"):
        return chosen(fleet, named)
    if model := request.query_params.get("model"):
        return serving(fleet, base_model(fleet, model))
    if not fleet.workers:
        raise RequestError(
            "There are no workers. POST /workers adds one.",
            status=503,
            type="service_unavailable",
            code="no_worker_available",
        )
    return fleet.workers


def _parameters(request: Request, data: bytes) -> Parameters:
    """Return the parameters for engines. Raises RequestError (400) for a body that is no JSON object."""
    query = [(name, value) for name, value in request.query_params.multi_items() if name not in _CHOOSING]
    try:
        body = msgspec.json.decode(data, type=dict[str, Any]) if data.strip() else {}
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"The body is no JSON object: {error}. Send {{}} or no body.") from error
    parameters = Parameters(query, body)
    for name, values in (("mode", MODES), ("level", ("0", "1", "2"))):
        value = parameters.get(name)
        if value is not None and str(value) not in values:
            raise RequestError(f"{name} is {value!r}. Send one of: {', '.join(values)}.", param=name)
    return parameters
