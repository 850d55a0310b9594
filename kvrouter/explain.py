"""`kvrouter explain`: where a request would go and why, as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from kvrouter.asking import ask


def print_explanation(url: str, body: dict[str, Any]) -> None:
    """Ask `/explain` and print its answer. Raises ConnectionError, saying what went wrong."""
    Console().print(_table(ask(url, "/explain", body)))


def _table(answer: dict[str, Any]) -> Table:
    candidates = answer["candidates"]
    terms = list(dict.fromkeys(term for candidate in candidates for term in candidate["terms"]))
    table = Table(title=f"{answer['tokens']} tokens for {answer['model'] or 'any model'}")
    table.add_column("worker")
    for name in ("rank", "overlap", "requests", *terms, "total"):
        table.add_column(name, justify="right")
    for candidate in candidates:
        chosen = all(candidate[key] == answer["choice"][key] for key in ("worker", "dp_rank"))
        figures = (candidate["terms"].get(term, 0.0) for term in terms)
        table.add_row(
            ("➤ " if chosen else "  ") + candidate["worker"],
            str(candidate["dp_rank"]),
            str(candidate["overlap"]),
            str(candidate["load"]["requests"]),
            *(f"{figure:.6g}" for figure in (*figures, candidate["total"])),
        )
    return table
