"""A table for terminals of any width: columns that do not fit are omitted, and no cell is cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_ANY_WIDTH = 10_000


@dataclass(frozen=True, slots=True)
class FittingColumn:
    """A column. That with the lowest `matters` is omitted first. With `wraps`, its words may use several lines."""

    title: str
    cells: Sequence[str | Text]
    matters: int
    left: bool = False
    wraps: bool = False

    def width(self) -> int:
        """Return the minimal width in characters."""
        texts = [self.title, *(str(cell) for cell in self.cells)]
        if self.wraps:
            texts = [word for text in texts for word in text.split()]
        return max(map(cell_len, texts), default=1)


class FittingTable:
    """A table of the `columns` that fit. Further options are those of rich's Table."""

    def __init__(self, columns: Sequence[FittingColumn], **options: Any) -> None:
        self._columns = columns
        self._options = options

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        kept = list(self._columns)
        wide = options.update(max_width=_ANY_WIDTH)
        while len(kept) > 1 and Measurement.get(console, wide, self._table(kept)).minimum > options.max_width:
            kept.remove(min(kept, key=lambda column: column.matters))
        yield self._table(kept)

    def _table(self, columns: list[FittingColumn]) -> Table:
        table = Table(**self._options)
        for column in columns:
            table.add_column(
                column.title,
                justify="left" if column.left else "right",
                overflow="fold",
                no_wrap=not column.wraps and len(columns) > 1,
                min_width=column.width() if len(columns) > 1 else None,
            )
        for row in zip(*(column.cells for column in columns), strict=True):
            table.add_row(*row)
        return table
