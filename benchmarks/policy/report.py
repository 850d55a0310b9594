"""The tables of a run in aligned Markdown: medians over the seeds, with the spread of TTFT p90."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.policy.measures import Measures
from benchmarks.policy.sides import OURS_AT_ONCE
from simulator.fleet.simulated_router import OURS

_COLUMNS = ("hit rate", "TTFT p50", "p90", "(spread)", "p99", "TPOT p50", "p90", "goodput")


@dataclass(frozen=True, slots=True)
class CellResult:
    """The figures of every router in a cell, for each seed."""

    name: str
    by_side: Mapping[str, Sequence[Measures]]

    def ttft_p90(self, side: str) -> list[float]:
        """Return the TTFT p90 of a router, for each seed."""
        return [measures.ttft_p90 for measures in self.by_side[side]]

    def table(self) -> str:
        """Return the cell as a table with a row for each router."""
        rows = [[self.name, *_COLUMNS]]
        for side, runs in self.by_side.items():
            p90 = self.ttft_p90(side)
            rows.append(
                [
                    side,
                    f"{median(run.hit_rate for run in runs):.3f}",
                    _seconds(median(run.ttft_p50 for run in runs)),
                    _seconds(median(p90)),
                    f"{_seconds(min(p90))}-{_seconds(max(p90))}",
                    _seconds(median(run.ttft_p99 for run in runs)),
                    f"{1000 * median(run.tpot_p50 for run in runs):.0f} ms",
                    f"{1000 * median(run.tpot_p90 for run in runs):.0f} ms",
                    f"{median(run.goodput for run in runs):.1f}/s",
                ]
            )
        return markdown(rows)

    def lost_to(self, ours: str) -> list[str]:
        """Return the peers that beat a router of ours.

        Their TTFT p90 is more than 5% lower in the median, and for more than half of the seeds.
        """
        mine = self.ttft_p90(ours)
        return [
            side
            for side in self.by_side
            if side not in (OURS.name, OURS_AT_ONCE.name)
            and median(self.ttft_p90(side)) < 0.95 * median(mine)
            and 2 * sum(b < 0.95 * a for a, b in zip(mine, self.ttft_p90(side), strict=True)) > len(mine)
        ]


def verdict(results: Iterable[CellResult]) -> str:
    """Return a table of TTFT p90 with a row for each cell: ours, and the best peer."""
    rows = [["TTFT p90", OURS.name, OURS_AT_ONCE.name, "best peer", "", "ours / best peer"]]
    for result in results:
        ours, at_once = (median(result.ttft_p90(side.name)) for side in (OURS, OURS_AT_ONCE))
        peers = {
            side: median(result.ttft_p90(side)) for side in result.by_side if side not in (OURS.name, OURS_AT_ONCE.name)
        }
        best = min(peers, key=lambda side: peers[side])
        lost = " (lost)" if result.lost_to(OURS.name) else ""
        row = [_seconds(ours), _seconds(at_once), _seconds(peers[best]), best, f"{ours / peers[best]:.2f}{lost}"]
        rows.append([result.name, *row])
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table. The first row is its head. All columns but the first are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["| " + " | ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) + " |" for row in rows]
    rule = "| " + " | ".join(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]) + " |"
    return "\n".join([lines[0], rule, *lines[1:]])


def _seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 100 else f"{value:.1f} s" if value >= 10 else f"{value:.2f} s"
