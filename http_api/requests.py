"""Reading of requests: the JSON body of a route, and the bearer token that protects routes which change state."""

from __future__ import annotations

from collections.abc import Callable
from secrets import compare_digest
from typing import TypeVar

import msgspec
from fastapi import Request

from http_api.errors import RequestError

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


def token_check(token: str) -> Callable[[Request], None]:
    """Return a FastAPI dependency that requires `Authorization: Bearer <token>`. An empty token allows all requests."""

    def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if token and not (scheme.lower() == "bearer" and compare_digest(given.strip().encode(), token.encode())):
            raise RequestError(
                "This changes the state of the service. Send Authorization: Bearer with the token of server.token.",
                status=401,
                type="authentication_error",
                param="authorization",
            )

    return check
