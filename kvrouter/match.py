"""`kvrouter match`: who holds how much of a prompt, as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from kvrouter.api_client import ask


def print_matches(url: str, body: dict[str, Any]) -> None:
    """Ask `/match` and print its answer. Raises ConnectionError, saying what went wrong."""
    Console().print(_table(ask(url, "/match", body)))


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
