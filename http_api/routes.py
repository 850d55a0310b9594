"""Parts of FastAPI routes: bodies as structs, the bearer token, JSON responses, and OpenAI's error responses."""

from __future__ import annotations

from secrets import compare_digest
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from http_api.errors import RequestError, error_body, error_headers
from http_api.mistakes import expected

T = TypeVar("T")


def decode_body(body: bytes, kind: type[T]) -> T:
    """Decode a JSON body as `kind`. Raises RequestError, which names the field that does not fit."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(f"{error}. Send a JSON object as the API describes.", param=_field(str(error))) from error
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RequestError(f"The body is not JSON: {error}. Send one JSON object.") from error


def _field(message: str) -> str | None:
    """Return the field that a msgspec message is about: the path at its end, or the field it reports as missing."""
    _, quote, path = message.rpartition("`$.")
    if quote:
        return path.removesuffix("`").partition(".")[0].partition("[")[0]
    missing = message.partition("required field `")[2].partition("`")[0]
    return missing or None


def check_token(request: Request) -> None:
    """Require `Authorization: Bearer` with the application's `state.token`, as a FastAPI dependency.

    An empty token allows all requests.
    """
    token: str = request.app.state.token
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if token and not (scheme.lower() == "bearer" and compare_digest(given.strip().encode(), token.encode())):
        raise RequestError(
            "This changes the state of the service. Send Authorization: Bearer with the token of server.token.",
            status=401,
            type="authentication_error",
            param="authorization",
        )


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
        return error_response(RequestError(f"{name}: {expected(first)}. Send it in the {first['loc'][0]}.", param=name))

    @app.exception_handler(HTTPException)
    async def report_http_error(request: Request, error: HTTPException) -> Response:
        kind = "not_found_error" if error.status_code == 404 else "invalid_request_error"
        message = f"{request.method} here: {error.detail}."
        return error_response(RequestError(message, status=error.status_code, type=kind))
