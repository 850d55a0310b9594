"""The result of a run of the traffic, as a line of a table."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import quantiles

from rich.console import Console
from rich.table import Table

from engine.client import Answer

COLUMNS = (
    "policy",
    "users",
    "think time",
    "requests",
    "overlap exact",
    "prompt tokens cached",
    "TTFT p50",
    "TTFT p90",
    "requests per worker",
)


def cached_share(answers: list[Answer]) -> float:
    """The share of all prompt tokens that came from the engines' caches."""
    return sum(answer.cached for answer in answers) / sum(answer.prompt_tokens for answer in answers)


class Answered:
    """Answers, compared with the predictions."""

    answers: list[Answer]

    @property
    def misses(self) -> list[Answer]:
        """Answers whose predicted overlap is not what the engine reported."""
        return [answer for answer in self.answers if answer.predicted != answer.cached]

    @property
    def exact_share(self) -> float:
        return 1 - len(self.misses) / len(self.answers)

    @property
    def cached_share(self) -> float:
        return cached_share(self.answers)


@dataclass(frozen=True)
class Run(Answered):
    """The conversations, sent with one policy, number of users and think time."""

    policy: str
    users: int
    think_seconds: float
    answers: list[Answer]

    @property
    def predicts(self) -> bool:
        """True if the policy predicts overlaps."""
        return any(answer.predicted for answer in self.answers)

    def explain_misses(self) -> str:
        """A line for each miss with what may explain it."""
        return "\n".join(
            f"{self.policy}, {self.users} users: predicted {miss.predicted}, cached {miss.cached} "
            f"of {miss.prompt_tokens} tokens at {miss.worker}, sent {self._since_last_end(miss)}"
            for miss in self.misses
        )

    def row(self) -> list[str]:
        """The cells under COLUMNS."""
        deciles = quantiles((answer.time_to_first_token for answer in self.answers), n=10, method="inclusive")
        per_worker = Counter(answer.worker for answer in self.answers)
        return [
            self.policy,
            str(self.users),
            f"{self.think_seconds:g} s",
            str(len(self.answers)),
            f"{self.exact_share:.1%}" if self.predicts else "-",
            f"{self.cached_share:.1%}",
            f"{deciles[4] * 1000:.0f} ms",
            f"{deciles[8] * 1000:.0f} ms",
            " + ".join(str(per_worker[worker]) for worker in sorted(per_worker)),
        ]

    def _since_last_end(self, answer: Answer) -> str:
        ends = [other.ended_at for other in self.answers if other.ended_at <= answer.sent_at]
        return f"{(answer.sent_at - max(ends)) * 1000:.1f} ms after the last answer" if ends else "first"


def print_table(runs: list[Run]) -> None:
    table = Table(*COLUMNS)
    for run in runs:
        table.add_row(*run.row())
    console = Console(width=140)
    console.print()
    console.print(table)
    for run in runs:
        if run.predicts and run.misses:
            console.print(run.explain_misses(), highlight=False)


def markdown(runs: list[Run]) -> str:
    """The table as Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(run.row() for run in runs)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
