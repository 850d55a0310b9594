"""The result of a mode of an engine, as a row of a table."""

from __future__ import annotations

from dataclasses import dataclass

from engine.client import Answer
from engine.report import Answered, cached_share

COLUMNS = ("mode", "requests", "exact", "over", "under", "over, of prompt tokens", "cached", "by round robin")


@dataclass(frozen=True)
class ModeResult(Answered):
    """The answers of a mode, and those to the same requests by round robin."""

    mode: str
    answers: list[Answer]
    beside: list[Answer]

    def over_share(self, but: int = 0) -> float:
        """Return the share of prompt tokens predicted and not cached, without the `but` largest misses."""
        over = sorted(max(answer.predicted - answer.cached, 0) for answer in self.answers)
        return sum(over[: len(over) - but]) / sum(answer.prompt_tokens for answer in self.answers)

    @property
    def beside_share(self) -> float:
        return cached_share(self.beside)

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
        shares = [f"{share:.1%}" for share in (self.over_share(), self.cached_share, self.beside_share)]
        return (self.mode, str(len(self.answers)), f"{self.exact_share:.1%}", str(over), str(under), *shares)
