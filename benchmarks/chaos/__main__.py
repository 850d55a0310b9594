"""The command `python -m benchmarks.chaos`, which `make bench-chaos` runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Annotated

import typer

from benchmarks.chaos.faults import ALL
from benchmarks.chaos.run import Plan, run_chaos, table

_MOST_PROBLEMS = 5


def main(
    workers: Annotated[int, typer.Option(min=len(ALL) + 1, help="Number of simulated workers.")] = Plan().workers,
    streams: Annotated[int, typer.Option(min=1, help="Number of concurrent streams.")] = Plan().streams,
    seconds: Annotated[float, typer.Option(min=5, help="Seconds of a phase.")] = Plan().seconds,
) -> None:
    """Attack one worker after another while clients stream."""
    result = asyncio.run(run_chaos(Plan(workers, streams, seconds), ALL))
    typer.echo(table(result))
    for phase in result.phases:
        for problem, number in Counter(stream.problem for stream in phase.lost).most_common(_MOST_PROBLEMS):
            typer.echo(f"lost while {phase.name}: {number} times {problem}")
    if result.left_over or any(phase.lost for phase in result.phases):
        raise typer.Exit(1)


typer.run(main)
