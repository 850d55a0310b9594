"""The door of a service whose routes are all its own, such as the index alone: heads are checked, bodies bounded."""

from __future__ import annotations

from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from indexer.errors import RequestError, error_body, error_headers
from router.access.arrivals import ArrivingBody
from router.access.door import Door
from router.http.headers import Headers
from router.settings import ServerSettings


class OwnRoutesMiddleware:
    """Before an application."""

    def __init__(self, app: ASGIApp, door: Door, settings: ServerSettings) -> None:
        self._app = app
        self._door = door
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: Headers = scope["headers"]
        body = ArrivingBody(receive, headers, self._settings, self._door.arrivals)

        async def send_and_close(message: Message) -> None:
            if message["type"] == "http.response.start" and not body.complete:  # nobody reads the rest
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        query = scope["query_string"]
        target = scope["raw_path"] + (b"?" + query if query else b"")
        try:
            self._door.admit(scope["method"], target, headers, scope["server"][1])
        except RequestError as error:
            answer = error_body(error)
            refusal = {"type": "http.response.start", "status": error.status, "headers": error_headers(error, answer)}
            await send_and_close(refusal)
            await send({"type": "http.response.body", "body": answer})
            return
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}  # the server leaves out the body
        try:
            with suppress(ClientDisconnect):
                await self._app(scope, self._door.whole(body, scope["method"]), send_and_close)
        finally:
            body.end()
