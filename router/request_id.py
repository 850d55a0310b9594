"""Every request has an id: the client's `x-request-id`, or one made here. It is forwarded, returned and logged."""

from __future__ import annotations

import re
from uuid import uuid4

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_USABLE = re.compile(rb"[!-~]{1,128}")  # what may stand in a log line and in a header


class RequestIds:
    """Gives every request to `app` its id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = [value for name, value in scope["headers"] if name == HEADER]
        request_id = given[0] if len(given) == 1 and _USABLE.fullmatch(given[0]) else uuid4().hex.encode()
        scope = dict(scope)
        scope["headers"] = _with_id(scope["headers"], request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _with_id(message.get("headers", []), request_id)
            await send(message)

        with structlog.contextvars.bound_contextvars(request_id=request_id.decode()):
            await self._app(scope, receive, send_with_id)


def _with_id(headers: list[tuple[bytes, bytes]], request_id: bytes) -> list[tuple[bytes, bytes]]:
    return [*((name, value) for name, value in headers if name.lower() != HEADER), (HEADER, request_id)]
