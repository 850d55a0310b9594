"""`/v1/models`: the models of all workers, in OpenAI's format."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from http_api.errors import RequestError
from http_api.openapi import errors
from router.app.services import services_of
from router.auth import Tenant
from router.fleet.discovery import OWN_MODELS
from router.fleet.fleet import Fleet
from router.forwarding.request_context import context_of

routes = APIRouter()


@routes.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """List every model and adapter that a worker serves. A tenant sees only those that it may use."""
    services, tenant = services_of(request), context_of(request.scope).tenant
    return {"object": "list", "data": list(model_cards(services.fleet, services.started, tenant).values())}


@routes.get("/v1/models/{name:path}", responses=errors(400, 404))
async def model(name: str, request: Request) -> dict[str, Any]:
    """Return the card of one model or adapter."""
    services = services_of(request)
    return model_card(services.fleet, services.started, name, context_of(request.scope).tenant)


def model_cards(fleet: Fleet, created: int, tenant: Tenant | None = None) -> dict[str, dict[str, Any]]:
    """Return the cards of models, adapters and aliases that the tenant may use, by name. `created`: unix seconds."""
    cards: dict[str, dict[str, Any]] = {}
    for worker in fleet.generating:
        if worker in fleet.declared:
            continue
        for served in worker.description.models.values() if worker.description else ():
            if tenant is not None and not tenant.may_use(served.name):
                continue
            known = cards.setdefault(
                served.name,
                {
                    "id": served.name,
                    "object": "model",
                    "created": created,
                    "owned_by": OWN_MODELS,
                    "root": served.root,
                    "parent": served.model if served.adapter else None,
                    "max_model_len": served.max_model_len,
                },
            )
            lengths = (known["max_model_len"], served.max_model_len)
            known["max_model_len"] = max((length for length in lengths if length is not None), default=None)
    for alias, name in fleet.aliases.items():
        if name in cards:
            cards[alias] = {**cards[name], "id": alias}
    return cards


def model_card(fleet: Fleet, created: int, name: str, tenant: Tenant | None = None) -> dict[str, Any]:
    """Return the card of one model or adapter. Raises RequestError (404) for an unknown name."""
    cards = model_cards(fleet, created, tenant)
    if name not in cards:
        raise RequestError(
            f"The model {name!r} does not exist. The models are: {', '.join(sorted(cards)) or 'none yet'}.",
            status=404,
            type="not_found_error",
            param="model",
            code="model_not_found",
        )
    return cards[name]
