"""`kvrouter explain`: where a request would go and why, as a table."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from kvrouter.api_client import ask


def print_explanation(url: str, body: dict[str, Any]) -> None:
    """Ask `/explain` and print its answer. Raises ConnectionError, saying what went wrong."""
    answer = ask(url, "/explain", body)
    console = Console()
    console.print(_table(answer))
    if decided := answer.get("disaggregation"):
        prefill = decided.get("prefill")
        where = f"on {prefill['worker']}, rank {prefill['dp_rank']}" if prefill else "where it is decoded"
        console.print(f"The prompt is computed {where}: {decided['reason']}.")


def _table(answer: dict[str, Any]) -> Table:
    """A row for each candidate: what stays readable in 80 columns, whatever the policy weighs."""
    title = f"{answer['tokens']} tokens for {answer['model'] or 'any model'}; cost in {answer['unit']}"
    table = Table(title=title, box=SIMPLE_HEAD)
    longest = max((len(candidate["worker"]) for candidate in answer["candidates"]), default=0)
    table.add_column()
    table.add_column("worker", overflow="fold", no_wrap=longest < 32)
    for name in ("rank", "overlap", "requests", "cost"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("of it")
    for candidate in answer["candidates"]:
        chosen = all(candidate[key] == answer["choice"][key] for key in ("worker", "dp_rank"))
        table.add_row(
            "➤" if chosen else "",
            candidate["worker"],
            str(candidate["dp_rank"]),
            str(candidate["overlap"]),
            str(candidate["load"]["requests"]),
            f"{candidate['total']:.6g}",
            ", ".join(f"{term} {figure:.6g}" for term, figure in candidate["terms"].items() if figure),
        )
    return table
