"""`/v1/models`: what all workers together serve, as OpenAI's clients expect it."""

from __future__ import annotations

from typing import Any

from indexer.errors import RequestError
from router.access import Tenant
from router.fleet.fleet import Fleet


def model_cards(fleet: Fleet, created: int, tenant: Tenant | None = None) -> dict[str, dict[str, Any]]:
    """A card for every model and adapter that a worker serves and the tenant may use, by name.

    `created`: since when, for all of them.
    """
    cards: dict[str, dict[str, Any]] = {}
    for worker in fleet.workers:
        for served in worker.description.models.values() if worker.description else ():
            if tenant is not None and not tenant.may_use(served.name):
                continue
            known = cards.setdefault(
                served.name,
                {
                    "id": served.name,
                    "object": "model",
                    "created": created,
                    "owned_by": "kvrouter",
                    "root": served.root,
                    "parent": served.model if served.adapter else None,
                    "max_model_len": served.max_model_len,
                },
            )
            lengths = (known["max_model_len"], served.max_model_len)
            known["max_model_len"] = min((length for length in lengths if length is not None), default=None)
    return cards


def model_card(fleet: Fleet, created: int, name: str, tenant: Tenant | None = None) -> dict[str, Any]:
    """One of them. Raises RequestError (404) when there is none."""
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
