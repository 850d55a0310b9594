"""`kvrouter explain`: where a request would go and why, as a table."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console

from kvrouter.api_client import ask
from kvrouter.fitting_table import FittingColumn, FittingTable


def print_explanation(url: str, body: dict[str, Any]) -> None:
    """Ask `/explain` and print its answer. Raises ConnectionError, saying what went wrong."""
    answer = ask(url, "/explain", body)
    console = Console()
    console.print(_table(answer))
    if decided := answer.get("disaggregation"):
        prefill = decided.get("prefill")
        where = f"on {prefill['worker']}, rank {prefill['dp_rank']}" if prefill else "where it is decoded"
        console.print(f"The prompt is computed {where}: {decided['reason']}.")


def _table(answer: dict[str, Any]) -> FittingTable:
    """A row for each candidate: what stays readable at any width, whatever the policy weighs."""
    candidates = answer["candidates"]
    chosen = [all(each[key] == answer["choice"][key] for key in ("worker", "dp_rank")) for each in candidates]
    unit = f" ({answer['unit']})" if answer.get("unit") else ""
    columns = [
        FittingColumn("", ["➤" if each else "" for each in chosen], 8),
        FittingColumn("worker", [each["worker"] for each in candidates], 9, left=True),
        FittingColumn("rank", [str(each["dp_rank"]) for each in candidates], 7),
        FittingColumn("overlap", [str(each["overlap"]) for each in candidates], 5),
        FittingColumn("requests", [str(each["load"]["requests"]) for each in candidates], 3),
        FittingColumn(f"cost{unit}", [f"{each['total']:.6g}" for each in candidates], 6),
        FittingColumn("of it", [_terms(each) for each in candidates], 4, left=True, wraps=True),
    ]
    return FittingTable(
        columns, title=f"{answer['tokens']} tokens for {answer['model'] or 'any model'}", box=SIMPLE_HEAD
    )


def _terms(candidate: dict[str, Any]) -> str:
    return ", ".join(f"{term} {figure:.6g}" for term, figure in candidate["terms"].items() if figure)
