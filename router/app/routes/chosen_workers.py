"""The workers that an operator's command is for: named ones, or all that serve a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from http_api.errors import RequestError
from router.fleet.fleet import Fleet
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
    """Return the base model of a name. None as name means the only model of the workers.

    Raises RequestError for an unknown name, and for None if the workers do not serve exactly one model.
    """
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
