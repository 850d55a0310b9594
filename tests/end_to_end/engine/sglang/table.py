"""The table of results: for each kind of traffic, how many predictions equal the engine's count."""

from __future__ import annotations

from collections.abc import Sequence

from engine.sglang.asking import Answer


class Table:
    """Rows of results, in the order of the tests."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str]] = []

    def add(self, what: str, result: str) -> None:
        self._rows.append((what, result))

    def add_predictions(self, what: str, answers: Sequence[Answer]) -> None:
        """Add how many of these answers were predicted exactly."""
        exact = sum(answer.exact for answer in answers)
        cached = sum(answer.cached or 0 for answer in answers)
        self.add(what, f"{exact} of {len(answers)} predictions exact, {cached} tokens cached")

    def __str__(self) -> str:
        lines = [f"| {what} | {result} |" for what, result in sorted(self._rows)]
        return "\n".join(["| traffic | result |", "|---|---|", *lines])
