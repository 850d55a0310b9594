"""The router as one FastAPI application: the OpenAI-compatible proxy, and the index API beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from http_api.openapi import add_api_page
from http_api.routes import add_error_handlers
from indexer.api.questions import Questions
from indexer.api.routes import index_routes
from router.app.all_processes import AllProcesses
from router.app.routes.commands import adapter_routes, engine_routes
from router.app.routes.explain import explain_routes, match_reader
from router.app.routes.model_cards import model_routes
from router.app.routes.status import live_routes, status_routes
from router.app.routes.workers import worker_routes
from router.app.services import Services, running_services
from router.forwarding.dispatcher import Dispatcher
from router.settings import Settings, SettingsFile
from router.sharing.worker_processes import WorkerProcesses


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
    app.state.on_shutdown = services.end_streams
    app.state.readiness = services.readiness
    app.state.fleet = services.fleet
    app.state.about = services.observability.about
    app.state.proxy_context = services.proxy
    pulls = services.routing.state.pulls
    questions = Questions(
        services.indexer,
        match_reader(services.tokenizers, services.routing.reader.resolve),
        None if pulls is None else pulls.pullable,
    )
    app.state.dispatcher = Dispatcher(
        app, services.proxy.contexts, services.proxy.settings, questions, services.proxy.services
    )
    token = services.settings.server.token
    # FastAPI would rebuild the routes of an included router at the first request, which would delay all requests.
    app.router.routes += index_routes(services.indexer, questions, services.registered_streams.admit, token).routes
    for routes in (
        adapter_routes,
        engine_routes,
        worker_routes,
        model_routes,
        explain_routes,
        status_routes,
        live_routes,
    ):
        app.router.routes += routes(services).routes
    add_api_page(app)
    add_error_handlers(app)
    if services.worker_processes:
        app.add_middleware(AllProcesses, services.worker_processes, services.fleet)
    return app
