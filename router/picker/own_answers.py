"""Requests that the picker answers itself, because no single worker could: the list of models."""

from __future__ import annotations

import time

import msgspec

from router.app.routes.model_cards import model_card, model_cards
from router.fleet.fleet import Fleet
from router.forwarding.request_context import RequestContext

_MODELS = "/v1/models"


class OwnAnswers:
    """What all workers together serve."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._started = int(time.time())

    def to(self, context: RequestContext) -> bytes | None:
        """The answer's body; None when the request is for a worker. Raises RequestError (404)."""
        if context.head.method != "GET" or not context.head.path.startswith(_MODELS):
            return None
        if context.head.path == _MODELS:
            cards = model_cards(self._fleet, self._started, context.tenant)
            return msgspec.json.encode({"object": "list", "data": list(cards.values())})
        if context.head.path.startswith(_MODELS + "/"):
            name = context.head.path.removeprefix(_MODELS + "/")
            return msgspec.json.encode(model_card(self._fleet, self._started, name, context.tenant))
        return None
