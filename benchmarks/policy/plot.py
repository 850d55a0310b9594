"""A picture of a run: TTFT p90 of every policy in every cell. Needs the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.policy.report import CellResult


def plot(results: Sequence[CellResult], path: Path) -> None:
    """Write a picture in the format that the file's name says."""
    from matplotlib.figure import Figure

    sides = list(results[0].by_side)
    figure = Figure(figsize=(10, 0.55 * len(results) + 2), layout="constrained")
    axes = figure.subplots()
    for number, side in enumerate(sides):
        places = [place + 0.04 * (number - len(sides) / 2) for place in range(len(results))]
        p90 = [result.ttft_p90(side) for result in results]
        middle = [median(values) for values in p90]
        spread = [
            [value - min(values) for value, values in zip(middle, p90, strict=True)],
            [max(values) - value for value, values in zip(middle, p90, strict=True)],
        ]
        axes.errorbar(middle, places, xerr=spread, fmt="o", markersize=4, linewidth=1, label=side)
    axes.set_yticks(range(len(results)), [result.name for result in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("TTFT p90, seconds (median of the seeds, and their spread)")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7, loc="best")
    figure.savefig(path, dpi=150)
