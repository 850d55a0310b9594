"""What a mode of an engine showed, as a row of a table that several runs fill."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.client import Answer

COLUMNS = ("mode", "requests", "exact", "over", "under", "over, of prompt tokens", "cached", "by round robin")


@dataclass(frozen=True)
class ModeResult:
    """The answers of a mode, and those to the same requests by round robin."""

    mode: str
    answers: list[Answer]
    beside: list[Answer]

    @property
    def misses(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.predicted != answer.cached]

    @property
    def exact_share(self) -> float:
        return 1 - len(self.misses) / len(self.answers)

    @property
    def over_share(self) -> float:
        """The tokens that were predicted and not found, of all prompts' tokens."""
        over = sum(max(answer.predicted - answer.cached, 0) for answer in self.answers)
        return over / sum(answer.prompt_tokens for answer in self.answers)

    @property
    def cached_share(self) -> float:
        return _cached_share(self.answers)

    @property
    def beside_share(self) -> float:
        return _cached_share(self.beside)

    def explain_misses(self) -> str:
        return "\n".join(
            f"{self.mode}: request {number} predicted {answer.predicted}, cached {answer.cached} of "
            f"{answer.prompt_tokens} at {answer.worker} {answer.dp_rank}"
            for number, answer in enumerate(self.answers)
            if answer in self.misses
        )

    def row(self) -> tuple[str, ...]:
        """The cells under COLUMNS."""
        over = sum(answer.predicted > answer.cached for answer in self.answers)
        under = len(self.misses) - over
        shares = [f"{share:.1%}" for share in (self.over_share, self.cached_share, self.beside_share)]
        return (self.mode, str(len(self.answers)), f"{self.exact_share:.1%}", str(over), str(under), *shares)


def write_table(results: list[ModeResult], path: str | None) -> None:
    """Print the rows, and put them into the table of a file, in the place of those of the same modes."""
    rows = {row[0]: row for row in (result.row() for result in results)}
    print("\n" + _markdown(list(rows.values())))
    for result in results:
        print(result.explain_misses())
    if path:
        file = Path(path)
        before = file.read_text().splitlines()[2:] if file.exists() else []
        kept = [tuple(cell.strip() for cell in line.strip("| ").split("|")) for line in before]
        file.write_text(_markdown(list(({row[0]: row for row in kept} | rows).values())))


def _markdown(rows: list[tuple[str, ...]]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cached_share(answers: list[Answer]) -> float:
    return sum(answer.cached for answer in answers) / sum(answer.prompt_tokens for answer in answers)
