"""Running the services until they are told to stop."""

from __future__ import annotations

import asyncio
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import structlog
import uvicorn
from fastapi import FastAPI

from indexer.app import indexer_app
from indexer.errors import RequestError
from router.access import Door, OwnRoutesMiddleware
from router.app import running_router
from router.embedded_index import running_indexer
from router.fleet.config_reload import SettingsFile
from router.forwarding.proxy import ProxyContext
from router.http.cached_head import RecentHeads
from router.routes.match_requests import match_reader
from router.server.asgi_fallback import uvicorn_fits
from router.server.fast_lane import FastLaneProtocol
from router.server.http_protocol import BoundedHttpProtocol
from router.server.memory import collect_rarely, keep_freed_memory
from router.settings import ServerSettings, Settings
from router.sharing.worker_processes import WorkerProcesses
from router.tokens.tokenizer_source import configured_tokenizers

log = structlog.get_logger()

# Longer than clients and balancers keep an idle connection: a request on one that we close meanwhile would be lost.
KEEP_ALIVE_SECONDS = 75

_BACKLOG = 2048


async def serve_router(settings: Settings, file: SettingsFile | None = None) -> None:
    """Run the router until SIGINT or SIGTERM. Raises OSError when its address cannot be bound."""
    listening = listen_at(settings.server)
    async with running_router(settings, file) as app:
        await _run_app(app, listening, settings.server, "kvrouter")


async def serve_picker(settings: Settings, file: SettingsFile | None = None) -> None:
    """Run the router with an endpoint picker for Envoy beside it. Raises OSError when an address cannot be bound."""
    from router.picker import running_picker  # an extra

    listening = listen_at(settings.server)
    async with running_router(settings, file) as app, running_picker(app, settings) as port:
        print(f"kvrouter picker serves Envoy at {settings.server.host}:{port}", file=sys.stderr, flush=True)
        await _run_app(app, listening, settings.server, "kvrouter picker")


async def serve_worker_process(
    settings: Settings,
    file: SettingsFile | None,
    worker_processes: WorkerProcesses,
    port: int,
    ready: Callable[[], None],
    parent: int,
) -> None:
    """Run one of several processes until SIGINT, SIGTERM, or the end of its parent, whose sentinel is `parent`.

    The others may ask it from the start; they wait until it serves. Then `ready` is called.
    """
    worker_processes.path.unlink(missing_ok=True)
    with closing(socket.socket(socket.AF_UNIX)) as beside:
        beside.bind(str(worker_processes.path))
        beside.listen(_BACKLOG)
        async with running_router(settings, file, worker_processes) as app:
            server = HttpServer(app, settings.server.shutdown_timeout, settings.server.certificate, settings.server.key)
            for_siblings = HttpServer(app, shutdown_timeout=1)
            answering = asyncio.create_task(for_siblings.serve(sockets=[beside]))
            loop = asyncio.get_running_loop()
            with _stopped_by_signals(server, app, settings.server.drain_seconds) as stop:
                loop.add_reader(parent, lambda: (loop.remove_reader(parent), stop()))
                listening = listen_at(settings.server, port, shared=True)
                ready()
                await server.serve(sockets=listening)
                loop.remove_reader(parent)
            for_siblings.should_exit = True
            await answering


async def serve_indexer(settings: Settings) -> None:
    """Run the index alone. Raises OSError for the address, TokenizerUnavailableError for a configured tokenizer."""
    listening = listen_at(settings.server)
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
        app.add_middleware(OwnRoutesMiddleware, Door(settings), settings.server)
        await _run_app(app, listening, settings.server, "kvrouter indexer")


def raise_file_limit() -> None:
    """Have as many open files as may be: each event stream takes several, and each connection one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen_at(settings: ServerSettings, port: int | None = None, *, shared: bool = False) -> list[socket.socket]:
    """Sockets that listen at a server's port, or the one found for it, and at the operator's. Raises OSError."""
    sockets = [listen(settings.host, settings.port if port is None else port, shared=shared)]
    if settings.admin_port is not None:
        sockets.append(listen(settings.host, settings.admin_port, shared=shared))
    return sockets


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket; port 0 takes a free one. Who connects early waits. Raises OSError."""
    listening = bind(host, port, shared=shared)
    listening.listen(_BACKLOG)
    return listening


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that has an address and does not listen yet. `shared`: others that say so too may have the same one."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections inherit it. asyncio would leave it off, and every answer's body would wait 40 ms for its headers'
        # ACK.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"{error.strerror}: {host}:{port}") from error
    return bound


def url_of(host: str, port: int, encrypted: bool) -> str:
    """Where a server can be reached."""
    return f"{'https' if encrypted else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the requests in flight; those that would never end are told to."""
        if end := getattr(self.config.app.state, "on_shutdown", None):  # type: ignore[union-attr]
            await end()
        await super().shutdown(sockets)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()  # uvicorn would raise them again at its end, before ours

    def drain(self) -> None:
        """Let clients connect anew, elsewhere if they can, instead of reusing their connections."""
        self.config.encoded_headers.append((b"connection", b"close"))
        self.server_state.default_headers = [*self.server_state.default_headers, (b"connection", b"close")]


def _http_protocol(app: FastAPI) -> Callable[..., asyncio.Protocol | FastLaneProtocol]:
    proxy_context: ProxyContext | None = getattr(app.state, "proxy_context", None)
    if proxy_context is None or not proxy_context.settings.fast_lane:
        return BoundedHttpProtocol
    if not uvicorn_fits():
        log.warning("the fast lane is closed: it does not know this uvicorn", version=uvicorn.__version__)
        return BoundedHttpProtocol
    return partial(FastLaneProtocol, proxy_context, RecentHeads())


async def _run_app(app: FastAPI, listening: list[socket.socket], settings: ServerSettings, name: str) -> None:
    """Serve on listening sockets, of which the first is named, until SIGINT or SIGTERM."""
    collect_rarely()
    keep_freed_memory()
    server = HttpServer(app, settings.shutdown_timeout, settings.certificate, settings.key)
    with _stopped_by_signals(server, app, settings.drain_seconds):
        host, port = listening[0].getsockname()[:2]
        url = url_of(host, port, settings.certificate is not None)
        print(f"{name} listens on {url}", file=sys.stderr, flush=True)
        await server.serve(sockets=listening)


@contextmanager
def _stopped_by_signals(server: HttpServer, app: FastAPI, drain_seconds: float) -> Iterator[Callable[[], None]]:
    """SIGINT stops a server, a second one without waiting for requests; SIGTERM does after it drained, a second one at
    once. Yields what SIGTERM does."""
    loop = asyncio.get_running_loop()

    def interrupt() -> None:
        server.force_exit = server.should_exit
        stop()

    def stop() -> None:
        server.should_exit = True

    def drain() -> None:
        readiness = getattr(app.state, "readiness", None)
        if readiness is None or readiness.stopping or not drain_seconds:
            stop()
            return
        readiness.stopping = True
        server.drain()
        loop.call_later(drain_seconds, stop)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    loop.add_signal_handler(signal.SIGTERM, drain)
    try:
        yield drain
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
