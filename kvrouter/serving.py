"""Running the services until they are told to stop."""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from indexer.app import indexer_app
from indexer.errors import RequestError
from kvrouter.http_protocol import BoundedHttpProtocol
from router.app import running_router
from router.config_reload import SettingsFile
from router.embedded_index import running_indexer
from router.match_requests import match_reader
from router.settings import ServerSettings, Settings
from router.tokenizer_source import configured_tokenizers

# Longer than clients and balancers keep an idle connection: a request on one that we close meanwhile would be lost.
KEEP_ALIVE_SECONDS = 75


async def serve_router(settings: Settings, file: SettingsFile | None = None) -> None:
    """Run the router until SIGINT or SIGTERM. Raises OSError when its address cannot be bound."""
    listening = listen(settings.server.host, settings.server.port)
    async with running_router(settings, file) as app:
        await _run_app(app, listening, settings.server, "kvrouter")


async def serve_indexer(settings: Settings) -> None:
    """Run the index alone. Raises OSError for the address, TokenizerUnavailableError for a configured tokenizer."""
    listening = listen(settings.server.host, settings.server.port)
    tokenizers = await configured_tokenizers(settings.models, settings.tokenizer)
    with running_indexer(settings) as indexer:
        indexer.register_saved()

        def resolve(name: str, tenant: str) -> tuple[str, str | None]:
            if not indexer.serves(name, tenant):
                raise RequestError(
                    f"no registered worker serves model {name!r}", status=404, type="not_found_error", param="model"
                )
            return name, None

        app = indexer_app(indexer, match_reader(tokenizers, resolve), settings.server.token)
        await _run_app(app, listening, settings.server, "kvrouter indexer")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Who connects early waits. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family, backlog=2048)
    # Connections inherit it. asyncio would leave it off, and every answer's body would wait 40 ms for its headers' ACK.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


class HttpServer(uvicorn.Server):
    """Serves an application; at its end requests in flight have `shutdown_timeout` seconds to finish."""

    def __init__(
        self, app: FastAPI, shutdown_timeout: float, certificate: Path | None = None, key: Path | None = None
    ) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ssl_certfile=certificate,
            ssl_keyfile=key,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(shutdown_timeout),
        )
        super().__init__(config)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # uvicorn would raise them again at its end, before ours


async def _run_app(app: FastAPI, listening: socket.socket, settings: ServerSettings, name: str) -> None:
    """Serve on a listening socket until SIGINT or SIGTERM."""
    server = HttpServer(app, settings.shutdown_timeout, settings.certificate, settings.key)
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, server.handle_exit)
    host, port = listening.getsockname()[:2]
    scheme = "https" if settings.certificate else "http"
    print(f"{name} listens on {scheme}://{f'[{host}]' if ':' in host else host}:{port}", file=sys.stderr, flush=True)
    await server.serve(sockets=[listening])
