"""Asking a running router or indexer something, from the command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from router.http.client import connection_problem


def ask(url: str, path: str, body: dict[str, Any], headers: Mapping[str, str] = {}) -> Any:
    """The answer to a question. Raises ConnectionError, saying what went wrong."""
    try:
        request = Request(
            url.rstrip("/") + path, json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
        )
        with urlopen(request, timeout=30) as response:
            return json.load(response)
    except HTTPError as error:
        try:
            reason = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = error.reason
        raise ConnectionError(f"{url} answers {error.code}: {reason}") from error
    except URLError as error:
        reason = error.reason if isinstance(error.reason, OSError) else error
        raise ConnectionError(f"{url} {connection_problem(reason)}") from error
    except (OSError, HTTPException) as error:
        raise ConnectionError(f"{url} {connection_problem(error)}") from error
    except ValueError as error:
        raise ConnectionError(f"{url} is no router: {error}") from error
