"""What the demo prints at its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from rich.table import Table

from kvrouter.tools.demo.play import Outcome


@dataclass(frozen=True, slots=True)
class Summary:
    """One run of the workload: the share of prompt tokens from cache, and the time to the first token in seconds."""

    cached_share: float
    ttft_p50: float
    ttft_p90: float
    seconds: float
    requests_by_worker: dict[str, int]


def summarise(outcomes: Sequence[Outcome], workers: Sequence[str], seconds: float) -> Summary:
    """The figures of a run; at least two outcomes."""
    deciles = quantiles((outcome.first_token for outcome in outcomes), n=10, method="inclusive")
    counted = Counter(outcome.worker for outcome in outcomes)
    return Summary(
        sum(outcome.cached_tokens for outcome in outcomes) / sum(outcome.prompt_tokens for outcome in outcomes),
        deciles[4],
        deciles[8],
        seconds,
        {worker: counted[worker] for worker in workers},
    )


def comparison(kv_aware: Summary, round_robin: Summary) -> Table:
    """Both runs side by side."""
    table = Table(title="The same workload, routed twice")
    table.add_column("")
    table.add_column("kv-aware", justify="right")
    table.add_column("round robin", justify="right")

    def row(name: str, show: str, value: str) -> None:
        table.add_row(name, *(show.format(getattr(summary, value)) for summary in (kv_aware, round_robin)))

    row("prompt tokens from cache", "{:.0%}", "cached_share")
    row("time to first token, p50", "{:.3f} s", "ttft_p50")
    row("time to first token, p90", "{:.3f} s", "ttft_p90")
    row("whole workload", "{:.1f} s", "seconds")
    for number, worker in enumerate(kv_aware.requests_by_worker, 1):
        counts = (summary.requests_by_worker[worker] for summary in (kv_aware, round_robin))
        table.add_row(f"requests to worker {number}", *map(str, counts))
    return table
