"""Tables of what was measured, printed and written as Markdown; several runs may fill one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Row = Sequence[str]


def write_table(columns: Row, rows: Sequence[Row], path: str | None) -> None:
    """Print the rows, and put them into the table of a file, in the place of those that begin alike."""
    print("\n" + _markdown(columns, rows))
    if path:
        file = Path(path)
        before = file.read_text().splitlines()[2:] if file.exists() else []
        kept = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in before]
        file.write_text(
            _markdown(columns, list(({row[0]: row for row in kept} | {row[0]: row for row in rows}).values()))
        )


def _markdown(columns: Row, rows: Sequence[Row]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (columns, ["---"] * len(columns), *rows))
