"""The HTTP responses of the index API."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Response

from http_api.errors import RequestError, error_body, error_headers


def json_response(value: Any, status: int = 200) -> Response:
    """An answer of JSON."""
    return encoded_response(msgspec.json.encode(value), status)


def encoded_response(answer: bytes, status: int = 200) -> Response:
    """The same of what is encoded already."""
    return Response(answer, status, media_type="application/json")


def refusal(error: RequestError) -> Response:
    """The answer to a request that cannot be served."""
    body = error_body(error)
    answer = Response(body, error.status)
    answer.raw_headers = error_headers(error, body)
    return answer
