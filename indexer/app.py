"""The index as a service of its own: what `kvrouter indexer` runs."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import RedirectResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from http_api.docs_page import add_api_page
from indexer.api import Admit, add_error_handlers, index_routes, workers_report
from indexer.build_info import add_process_metrics, build_info
from indexer.indexer import Indexer
from indexer.metrics import IndexCollector
from indexer.questions import Questions


def indexer_app(indexer: Indexer, questions: Questions, admit: Admit, token: str = "") -> FastAPI:
    """The application. Whoever calls this starts the indexer and stops it, and bounds the bodies that come."""
    app = FastAPI(title="kvrouter indexer", docs_url=None, redoc_url=None)
    app.router.routes += index_routes(indexer, questions, admit, token).routes  # included, they would be made twice
    add_error_handlers(app)
    registry = CollectorRegistry()
    registry.register(IndexCollector(indexer))
    add_process_metrics(registry)

    @app.get("/", include_in_schema=False)
    async def start() -> Response:
        return RedirectResponse("docs")

    @app.get("/workers")
    async def workers() -> dict[str, Any]:
        """Every registered target, its streams and what it holds."""
        return {"workers": workers_report(indexer)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 while the process serves; which version it is."""
        return {"status": "ok", **build_info()}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    add_api_page(app)
    return app
