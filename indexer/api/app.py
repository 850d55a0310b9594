"""The index as a service of its own, which `kvrouter indexer` runs."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from http_api.docs_page import add_api_page
from http_api.responses import add_error_handlers
from indexer.api.metrics import IndexCollector, add_process_metrics, build_info
from indexer.api.questions import Questions
from indexer.api.routes import Admit, index_routes, workers_report
from indexer.indexer import Indexer


def indexer_app(indexer: Indexer, questions: Questions, admit: Admit, token: str = "") -> FastAPI:
    """Return the application. The caller starts and stops the indexer, and limits the size of bodies."""
    app = FastAPI(title="kvrouter indexer", docs_url=None, redoc_url=None)
    app.router.routes += index_routes(indexer, questions, admit, token).routes  # include_router would copy each route
    add_error_handlers(app)
    registry = CollectorRegistry()
    registry.register(IndexCollector(indexer))
    add_process_metrics(registry)

    @app.get("/", include_in_schema=False)
    async def start() -> Response:
        return RedirectResponse("docs")

    @app.get("/workers")
    async def workers() -> dict[str, Any]:
        """Return every registered target with its stream and its blocks."""
        return {"workers": workers_report(indexer)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Return 200 while the process serves, with its version."""
        return {"status": "ok", **build_info()}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    add_api_page(app)
    return app
