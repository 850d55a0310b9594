"""The figures of a run: medians over its rounds, in readable Markdown tables."""

from __future__ import annotations

from pathlib import Path
from statistics import median

OURS, PEER = "kvrouter", "Dynamo"


class Table:
    """A value for each row, column and round. With both sides among the columns, the table has a ratio."""

    def __init__(self, title: str, note: str = "") -> None:
        self.title = title
        self.note = note
        self._values: dict[str, dict[str, list[float]]] = {}

    def add(self, row: str, column: str, value: float) -> None:
        """Add the value of one round."""
        self._values.setdefault(row, {}).setdefault(column, []).append(value)

    def render(self) -> str:
        """Return the table in Markdown; empty without values."""
        if not self._values:
            return ""
        columns = list(dict.fromkeys(column for row in self._values.values() for column in row))
        compare = OURS in columns and PEER in columns
        lines = [[self.title, *columns, *([f"{OURS} / {PEER}"] if compare else [])]]
        for name, row in self._values.items():
            medians = {column: median(values) for column, values in row.items()}
            cells = [_number(medians[column]) if column in medians else "" for column in columns]
            if compare:
                cells.append(f"{medians[OURS] / medians[PEER]:.2f}" if {OURS, PEER} <= medians.keys() else "")
            lines.append([name, *cells])
        widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
        lines.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
        text = "\n".join(
            "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
            for line in lines
        )
        return f"{text}\n\n{self.note}".rstrip()


def write_section(path: Path, title: str, text: str) -> None:
    """Replace the section of a Markdown file with this title, or append it."""
    heading = f"## {title}\n"
    before, found, rest = (path.read_text() if path.exists() else "# Benchmarks\n").partition(heading)
    _, next_heading, after = rest.partition("\n## ")
    if not found:
        before = before.rstrip("\n") + "\n\n"
    path.write_text(f"{before}{heading}\n{text.strip()}\n{next_heading}{after}")


def _number(value: float) -> str:
    """Format a number with three significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
