"""The services, each until SIGINT or SIGTERM: the router, the picker, the index alone, one process of several."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import socket
from collections.abc import Callable
from contextlib import closing

from fastapi import FastAPI

from http_api.errors import RequestError
from indexer import Indexer
from indexer.api.questions import Questions
from indexer.api.routes import indexer_app
from router.app.app import running_router
from router.app.embedded_index import running_indexer
from router.app.routes.explain import match_reader
from router.auth import AuthGate
from router.fleet.allowed_networks import AllowedNetworks
from router.fleet.event_streams import RegisteredStreams
from router.forwarding.dispatcher import Dispatcher
from router.forwarding.request_context import RequestContexts
from router.http.event_loop import end_tasks
from router.server.http_server import HttpServer, stopped_by_signals
from router.server.logs import announce_models, announce_page, announce_start, say
from router.server.sockets import listen_at, listen_at_path, url_of
from router.settings import ServerSettings, Settings, SettingsFile
from router.sharing.worker_processes import WorkerProcesses
from router.tokens.tokenizer_source import configured_tokenizers
from router.tokens.tokenizers import Tokenizers

# glibc's names for what mallopt sets, and the values they are given here.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 64 * 1024 * 1024
_OWN_MAPPING_BYTES = 4 * 1024 * 1024


def keep_freed_memory() -> None:
    """Keep up to 64 MiB of freed memory, which glibc would return to the system and map again for each body."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)


def collect_rarely() -> None:
    """Look for cycles of garbage less often, because requests make no cycles and present objects stay."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


async def serve_router(settings: Settings, file: SettingsFile | None = None) -> None:
    """Run the router until SIGINT or SIGTERM. Raises OSError when its address cannot be bound."""
    listening = listen_at(settings.server)
    announce_start(settings, "kvrouter")
    async with running_router(settings, file) as app:
        await _run_app(app, listening, settings.server, "kvrouter")


async def serve_picker(settings: Settings, file: SettingsFile | None = None) -> None:
    """Run the router with an endpoint picker for Envoy beside it. Raises OSError when an address cannot be bound."""
    from router.picker import running_picker  # an extra

    listening = listen_at(settings.server)
    announce_start(settings, "kvrouter picker")
    async with running_router(settings, file) as app, running_picker(app, settings) as port:
        say(f"kvrouter picker serves Envoy at {settings.server.host}:{port}")
        await _run_app(app, listening, settings.server, "kvrouter picker")


async def serve_worker_process(
    settings: Settings,
    file: SettingsFile | None,
    worker_processes: WorkerProcesses,
    port: int,
    ready: Callable[[], None],
    parent: int,
) -> None:
    """Run one of several processes until SIGINT, SIGTERM, or the end of its parent.

    `ready` is called when it serves. The other processes may ask it from the start, over a socket of its own.
    """
    with closing(listen_at_path(worker_processes.path)) as process_socket:
        async with running_router(settings, file, worker_processes) as app:
            server = HttpServer(app, settings.server.shutdown_timeout, settings.server.certificate, settings.server.key)
            process_server = HttpServer(app, shutdown_timeout=1)
            answering = asyncio.create_task(process_server.serve(sockets=[process_socket]))
            loop = asyncio.get_running_loop()
            with stopped_by_signals(server, app, settings.server.drain_seconds) as stop:
                loop.add_reader(parent, lambda: (loop.remove_reader(parent), stop()))
                listening = listen_at(settings.server, port, shared=True)
                if worker_processes.number == 0 and not worker_processes.again:
                    announce_models(app.state.about)
                ready()
                await server.serve(sockets=listening)
                loop.remove_reader(parent)
            process_server.should_exit = True
            await answering


async def serve_indexer(settings: Settings) -> None:
    """Run the index alone. Raises OSError for the address, TokenizerUnavailableError for a configured tokenizer."""
    listening = listen_at(settings.server)
    tokenizers = await configured_tokenizers(settings.models, settings.tokenizer)
    with running_indexer(settings) as indexer:
        indexer.register_saved()
        streams = RegisteredStreams(indexer, AllowedNetworks(settings.fleet.allowed_networks))
        app = index_app(settings, indexer, tokenizers, streams)
        following_names = asyncio.create_task(streams.run())
        try:
            await _run_app(app, listening, settings.server, "kvrouter indexer")
        finally:
            await end_tasks([following_names])


def index_app(settings: Settings, indexer: Indexer, tokenizers: Tokenizers, streams: RegisteredStreams) -> FastAPI:
    """Return the application of the index alone."""

    def resolve(name: str, tenant: str) -> tuple[str, str | None]:
        if not indexer.serves(name, tenant):
            raise RequestError(
                f"no registered worker serves model {name!r}", status=404, type="not_found_error", param="model"
            )
        return name, None

    questions = Questions(indexer, match_reader(tokenizers, resolve))
    contexts = RequestContexts(AuthGate(settings), None, None, settings.logs.access)
    app = indexer_app(indexer, questions, streams.admit, settings.server.token)
    app.state.dispatcher = Dispatcher(app, contexts, settings.server, questions)
    return app


async def _run_app(app: FastAPI, listening: list[socket.socket], settings: ServerSettings, name: str) -> None:
    """Serve on listening sockets, of which the first is named, until SIGINT or SIGTERM."""
    collect_rarely()
    keep_freed_memory()
    server = HttpServer(app, settings.shutdown_timeout, settings.certificate, settings.key)
    with stopped_by_signals(server, app, settings.drain_seconds):
        host, port = listening[0].getsockname()[:2]
        url = url_of(host, port, settings.certificate is not None)
        say(f"{name} listens on {url}")
        if about := getattr(app.state, "about", None):
            announce_models(about)
            announce_page(about.identity["policy"], url)
        await server.serve(sockets=listening)
