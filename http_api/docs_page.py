"""The page `GET /docs`: an application's endpoints as plain HTML, without scripts and without external resources."""

from __future__ import annotations

from html import escape
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = "body{font:15px/1.5 system-ui;max-width:52rem;margin:2rem auto;padding:0 1rem}code{font-weight:600}"


def add_api_page(app: FastAPI) -> None:
    """Serve the page `/docs`. Call this after all other routes were added, because the page lists them."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_page(app.title, app.openapi()), headers=_HEADERS)


def _page(title: str, schema: dict[str, Any]) -> str:
    entries = [
        f"<dt><code>{escape(method.upper())} {escape(path)}</code></dt><dd>{escape(about.get('description', ''))}</dd>"
        for path, methods in sorted(schema["paths"].items())
        for method, about in methods.items()
    ]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
        f'<h1>{escape(title)}</h1><p>Bodies and answers: <a href="openapi.json">openapi.json</a></p>'
        f"<dl>{''.join(entries)}</dl></html>"
    )
