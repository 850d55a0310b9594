"""JSON over HTTP."""

from __future__ import annotations

import json
from email.message import Message
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen


def get_json(url: str) -> Any:
    """The JSON a URL answers, None for an empty body. Raises HTTPError, OSError."""
    return _json(Request(url))


def post_json(url: str, body: Any = None, token: str = "") -> Any:
    """Post a JSON body, or none, with an optional bearer token. Return the JSON response. Raises HTTPError, OSError."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = b"" if body is None else json.dumps(body).encode()
    return _json(Request(url, data, headers, method="POST"))


def post_reply(url: str, body: Any, headers: dict[str, str] | None = None) -> tuple[Message, Any]:
    """The headers and the JSON that a URL answers to a JSON body. Raises HTTPError, OSError."""
    headers = {"Content-Type": "application/json"} | (headers or {})
    request = Request(url, json.dumps(body).encode(), headers, method="POST")
    with urlopen(request, timeout=60) as response:
        return response.headers, json.loads(response.read())


def answers(url: str) -> bool:
    """Return whether a URL answers 200."""
    try:
        get_json(url)
    except HTTPError as error:
        error.close()
        return False
    except (URLError, OSError):
        return False
    return True


def _json(request: Request) -> Any:
    with urlopen(request, timeout=30) as response:
        body = response.read()
    return json.loads(body) if body else None
