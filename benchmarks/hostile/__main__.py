"""The command `python -m benchmarks.hostile`, which `make soak-hostile` runs.

It fails if well-behaved clients suffer.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from benchmarks.hostile.run import Result, Service, run


def main(minutes: Annotated[float, typer.Option(min=0.2, help="Minutes of the run.")] = 30.0) -> None:
    """Serve well-behaved clients among hostile ones, and report their delay."""
    result = asyncio.run(run(minutes))
    print(_summary(result))
    problems = result.problems()
    print(
        "\n".join(f"PROBLEM {problem}" for problem in problems)
        or "No well-behaved client was affected, and nothing is left."
    )
    raise typer.Exit(bool(problems))


def _summary(result: Result) -> str:
    statuses = ", ".join(f"{count:,} {status or 'none'}" for status, count in sorted(result.statuses.items()))
    most = {name: max((sample[name] for sample in result.samples), default=0) for name in result.before}
    rows = []
    for name, before in result.before.items():
        unit, shown = (2**20, "resident MB") if name == "bytes" else (1, name)
        rows.append(f"{shown:22}{before // unit:>10}{most[name] // unit:>10}{result.left[name] // unit:>10}")
    return "\n".join(
        [
            f"{result.minutes:.1f} min; the hostile ones sent {result.statuses.total():,} connections and "
            f"{result.events:,} event messages",
            f"alone              {_shown(result.calm)}",
            f"among hostile ones {_shown(result.among)}; p99 {result.slower:.2f} times",
            f"answers to hostile clients: {statuses}",
            "",
            f"{'the router held':22}{'before':>10}{'most':>10}{'after':>10}",
            *rows,
            f"memory in the second half: {result.growth:+.1%}",
        ]
    )


def _shown(service: Service) -> str:
    lost = ", ".join(f"{count} {name}" for name, count in service.lost.items()) or "none"
    return (
        f"{len(service.seconds):,} requests, first part after {service.quantile(0.5) * 1000:.0f} ms (median), "
        f"{service.quantile(0.99) * 1000:.0f} ms (p99); lost: {lost}"
    )


if __name__ == "__main__":
    typer.run(main)
