"""JSON responses of FastAPI routes, and error responses in OpenAI's form."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from http_api.errors import RequestError, error_body, error_headers


def json_response(value: Any, status: int = 200) -> Response:
    """Return a response with `value` encoded as JSON."""
    return encoded_response(msgspec.json.encode(value), status)


def encoded_response(body: bytes, status: int = 200) -> Response:
    """Return a response whose body is JSON already."""
    return Response(body, status, media_type="application/json")


def error_response(error: RequestError) -> Response:
    """Return the response that reports a request error."""
    body = error_body(error)
    response = Response(body, error.status)
    response.raw_headers = error_headers(error, body)
    return response


def add_error_handlers(app: FastAPI) -> None:
    """Make an application report request errors, invalid parameters and unknown paths in OpenAI's form."""

    @app.exception_handler(RequestError)
    async def report_request_error(_: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def report_invalid_parameter(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        name = str(first["loc"][-1])
        return error_response(RequestError(f"{name}: {first['msg']}. Send it in the {first['loc'][0]}.", param=name))

    @app.exception_handler(HTTPException)
    async def report_http_error(request: Request, error: HTTPException) -> Response:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        message = f"{request.method} here: {error.detail}."
        return error_response(RequestError(message, status=error.status_code, type=kind))
