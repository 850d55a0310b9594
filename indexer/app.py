"""The index as a service of its own: what `kvrouter indexer` runs."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from indexer.api import Admit, ReadMatch, add_error_handlers, index_routes, workers_report
from indexer.bounded_bodies import BodyLimits, BoundedBodies
from indexer.indexer import Indexer
from indexer.metrics import IndexCollector


def indexer_app(
    indexer: Indexer, read_match: ReadMatch, admit: Admit, limits: BodyLimits | None = None, token: str = ""
) -> FastAPI:
    """The application. Whoever calls this starts the indexer and stops it."""
    app = FastAPI(title="kvrouter indexer")
    app.include_router(index_routes(indexer, read_match, admit, token))
    app.add_middleware(BoundedBodies, limits or BodyLimits())
    add_error_handlers(app)
    registry = CollectorRegistry()
    registry.register(IndexCollector(indexer))

    @app.get("/workers")
    async def workers() -> dict[str, Any]:
        """Every registered target, its streams and what it holds."""
        return {"workers": workers_report(indexer)}

    @app.get("/health")
    async def health() -> dict[str, str]:
        """200 while the process serves."""
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return app
