"""The router as one FastAPI application: the OpenAI-compatible proxy, and the index API beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from http_api.openapi import api_page_routes
from http_api.routes import add_error_handlers
from indexer.api.questions import Questions
from indexer.api.routes import IndexApi, index_routes
from router.app.all_processes import AllProcesses
from router.app.routes import commands, explain, model_cards, selection, status, workers
from router.app.services import Services, running_services
from router.forwarding.dispatcher import Dispatcher
from router.settings import Settings, SettingsFile
from router.sharing.worker_processes import WorkerProcesses

_SHARED = (
    index_routes,
    commands.routes,
    workers.routes,
    workers.changing_routes,
    model_cards.routes,
    explain.routes,
    status.routes,
    selection.routes,
    api_page_routes,
)


@asynccontextmanager
async def running_router(
    settings: Settings, file: SettingsFile | None = None, worker_processes: WorkerProcesses | None = None
) -> AsyncIterator[FastAPI]:
    """Start all services, yield the application over them, and stop them when the context ends."""
    async with running_services(settings, file, worker_processes) as services:
        yield router_app(services)


def router_app(services: Services) -> FastAPI:
    """Return the application over running services, with the dispatcher that serves it and forwards to workers."""
    app = FastAPI(title="kvrouter", docs_url=None, redoc_url=None)
    app.state.on_shutdown = services.end_answers
    app.state.readiness = services.readiness
    app.state.fleet = services.fleet
    app.state.about = services.observability.about
    app.state.proxy_context = services.proxy
    pulls = services.routing.state.pulls
    questions = Questions(
        services.indexer,
        explain.match_reader(services.tokenizers, services.routing.reader.resolve),
        None if pulls is None else pulls.pullable,
    )
    app.state.dispatcher = Dispatcher(
        app, services.proxy.contexts, services.proxy.settings, questions, services.proxy.services
    )
    app.state.services, app.state.token = services, services.settings.server.token
    app.state.index = IndexApi(services.indexer, questions, services.registered_streams.admit)
    for shared in _SHARED:  # FastAPI would copy the routes of an included router at the first request
        app.router.routes += shared.routes
    add_error_handlers(app)
    if services.worker_processes:
        app.add_middleware(AllProcesses, services.worker_processes, services.fleet, services.selection.workers.records)
    return app
