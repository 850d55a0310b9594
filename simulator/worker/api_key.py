"""The API key that a simulated worker wants, where the engine that it stands for wants it.

vLLM wants it for all under /v1, SGLang for all but /health and /metrics.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from secrets import compare_digest
from typing import Any

from starlette.responses import JSONResponse

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class KeyMiddleware:
    """Refuses with 401 what comes without the key."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]], api_key: str, sglang: bool) -> None:
        self._app = app
        self._expected = api_key.encode()
        self._sglang = sglang

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        guarded = scope["type"] == "http" and scope["method"] != "OPTIONS" and self._guards(scope["path"])
        if guarded and not self._opens(dict(scope["headers"]).get(b"authorization", b"")):
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _guards(self, path: str) -> bool:
        return not path.startswith(("/health", "/metrics")) if self._sglang else path.startswith("/v1")

    def _opens(self, authorization: bytes) -> bool:
        scheme, _, key = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and compare_digest(key, self._expected)
