"""One line in the log for every request: where it went, what came of it, and how long it took. No word of a prompt."""

from __future__ import annotations

import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = structlog.get_logger()

# What the proxy tells clients of its choice, under the names the log has for it.
_CHOICE = {
    b"x-kvrouter-worker": "worker",
    b"x-kvrouter-dp-rank": "dp_rank",
    b"x-kvrouter-overlap-tokens": "overlap",
}


class AccessLog:
    """Logs the requests to `app`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrived = time.monotonic()
        fields: dict[str, object] = {"status": None}  # of clients that leave before there is one
        sent = 0

        async def watched_send(message: Message) -> None:
            nonlocal sent
            if message["type"] == "http.response.start":
                fields["status"] = message["status"]
                fields.update({_CHOICE[n]: v.decode() for n, v in message.get("headers", ()) if n in _CHOICE})
            elif body := message.get("body"):
                if not sent:
                    fields["first_byte_ms"] = _ms_since(arrived)
                sent += len(body)
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            # The path without its query, which may hold anything.
            log.info("request", method=scope["method"], path=scope["path"], **fields, bytes=sent, ms=_ms_since(arrived))


def _ms_since(start: float) -> float:
    return round((time.monotonic() - start) * 1000, 1)
