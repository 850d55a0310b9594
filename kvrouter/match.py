"""`kvrouter match`: who holds how much of a prompt, as a table."""

from __future__ import annotations

import json
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.table import Table


def print_matches(url: str, body: dict[str, Any]) -> None:
    """Ask `/match` and print its answer. Raises ConnectionError, saying what went wrong."""
    try:
        request = Request(f"{url.rstrip('/')}/match", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(request, timeout=30) as response:
            answer = json.load(response)
    except HTTPError as error:
        try:
            reason = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            reason = error.reason
        raise ConnectionError(f"{url} answers {error.code}: {reason}") from error
    except (OSError, HTTPException) as error:
        raise ConnectionError(f"{url} cannot be reached: {error}") from error
    except ValueError as error:
        raise ConnectionError(f"{url} is no router: {error}") from error
    Console().print(_table(answer))


def _table(answer: dict[str, Any]) -> Table:
    table = Table(title=f"{answer['tokens']} tokens of {answer['model']}")
    for name in ("worker", "rank", "matched", "gpu", "cpu", "disk", "unknown"):
        table.add_column(name, justify="left" if name == "worker" else "right")
    for match in answer["matches"]:
        tiers = match["tiers"]
        counts = (
            match["dp_rank"],
            match["matched_tokens"],
            tiers["gpu"],
            tiers["cpu"],
            tiers["disk"],
            tiers["unknown"],
        )
        table.add_row(match["worker"], *map(str, counts))
    return table
