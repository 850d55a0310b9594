"""OpenAPI of the HTTP APIs: descriptions of bodies and errors, and the page `GET /docs`, plain HTML without scripts."""

from __future__ import annotations

from html import escape
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def json_body(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body is this struct."""
    return schema_body(msgspec.json.schema(kind))


def schema_body(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the `openapi_extra` of a route whose body has this JSON schema."""
    whole = _inlined(schema, schema.get("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": whole}}}}


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """Return a schema in which every `$ref` is replaced by its definition."""
    if isinstance(schema, list):
        return [_inlined(each, definitions) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in schema.items() if key != "$defs"}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route: its error statuses, each with OpenAI's error body."""
    described = {
        400: "The request body is invalid.",
        401: "The token is missing or wrong.",
        403: "The tenant, host or address is not allowed.",
        404: "The named resource does not exist.",
        409: "The change conflicts with the current state.",
        502: "A worker failed to carry out the request.",
        503: "No worker can be reached.",
    }
    return {
        status: {"description": described[status], "content": {"application/json": {"schema": _ERROR}}}
        for status in statuses
    }


_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = "body{font:15px/1.5 system-ui;max-width:52rem;margin:2rem auto;padding:0 1rem}code{font-weight:600}"


api_page_routes = APIRouter()


@api_page_routes.get("/docs", include_in_schema=False)
async def api_page(request: Request) -> HTMLResponse:
    """Return the page that lists all routes of the application."""
    return HTMLResponse(_page(request.app.title, request.app.openapi()), headers=_HEADERS)


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
