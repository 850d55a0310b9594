"""uvicorn's server with our protocols: it serves an application over HTTP, drains its connections, and ends in time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from router.forwarding.lane import Lane
from router.http.cached_head import RecentHeads
from router.server.asgi_fallback import uvicorn_fits
from router.server.fast_lane import FastLaneProtocol
from router.server.http_protocol import BoundedHttpProtocol

log = structlog.get_logger()

# So many connections are accepted in a turn of the loop: libuv takes one of a socket, and while many requests are
# served in each turn, clients that come would wait for as many turns as there are clients before them.
_ACCEPTED_A_TURN = 16
# Longer than clients and balancers keep an idle connection: a request on one that we close meanwhile would be lost.
KEEP_ALIVE_SECONDS = 75


class HttpServer(uvicorn.Server):
    """Serves an application; at its end requests in flight have `shutdown_timeout` seconds to finish."""

    def __init__(
        self, app: FastAPI, shutdown_timeout: float, certificate: Path | None = None, key: Path | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            http=_http_protocol(app),  # type: ignore[arg-type]  # called as a class is
            ssl_certfile=certificate,
            ssl_keyfile=key,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(shutdown_timeout),
        )
        super().__init__(config)
        self._connections = self.server_state.connections = Connections()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Raises OSError."""
        if sockets is not None:
            sockets = [each.dup() for each in sockets for _ in range(_ACCEPTED_A_TURN)]  # their servers close them
        await self.on_tick(0)  # the first sockets are served before the last listen: with the headers of all answers
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the requests in flight. Those that would never end by themselves are ended."""
        if end := getattr(self.config.app.state, "on_shutdown", None):  # type: ignore[union-attr]
            await end()
        self._connections.stopping = True
        await super().shutdown(sockets)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # uvicorn would raise them again at its end, before ours

    def drain(self) -> None:
        """Have clients open new connections, elsewhere if they can, instead of reusing the ones they have."""
        self.config.encoded_headers.append((b"connection", b"close"))
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]


class Connections(set[Any]):
    """Those of a server, which tells each when it stops. One that is accepted meanwhile comes too late for that: it is
    told as it comes, or it would be waited for."""

    stopping = False

    def add(self, connection: Any) -> None:
        """It is made."""
        super().add(connection)
        if self.stopping:
            asyncio.get_running_loop().call_soon(connection.shutdown)


def _http_protocol(app: FastAPI) -> Callable[..., asyncio.Protocol | FastLaneProtocol]:
    lane: Lane | None = getattr(app.state, "lane", None)
    root_path = b"" if lane is None else lane.settings.root_path.encode()
    bounded = partial(BoundedHttpProtocol, root_path)
    if lane is None or not lane.settings.fast_lane:
        return bounded
    if not uvicorn_fits():
        log.warning("the fast lane is closed: it does not know this uvicorn", version=uvicorn.__version__)
        return bounded
    return partial(FastLaneProtocol, lane, RecentHeads())
