"""The command `python -m benchmarks.replicas`, which `make test-replicas` runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Annotated

import typer

from benchmarks.policy.report import markdown
from benchmarks.replicas.load import imbalance, ttft
from benchmarks.replicas.redis_server import NoRedisError
from benchmarks.replicas.run import Plan, Side, run_sides
from kvrouter.tools.traces.results import percentile


def main(
    seconds: Annotated[float, typer.Option(min=9, help="Seconds of each run.")] = Plan().seconds,
    rate: Annotated[float, typer.Option(min=0.1, help="Requests a second.")] = Plan().rate,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each side, in turn.")] = 1,
) -> None:
    """Compare one router with several routers, with and without shared load."""
    wanted = Plan(seconds=seconds, rate=rate)
    try:
        sides = asyncio.run(run_sides(wanted, rounds))
    except NoRedisError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
    print(f"{wanted.workers} simulated workers, {rate:g} requests/s, {rounds} x {seconds:g} s")
    print(table(sides, wanted.workers))
    for side in sides:
        for what, so in side.seen.items():
            print(f"{side.name}: {what}: {'yes' if so else 'NO'}")
        for problem, number in Counter(answer.problem for answer in side.lost).most_common(5):
            print(f"lost by {side.name}: {number} times {problem}")
    if any(side.lost or not all(side.seen.values()) for side in sides):
        raise typer.Exit(1)


def table(sides: list[Side], workers: int) -> str:
    """Return a table with a row for each side, relative to the first."""
    rows = [["", "requests", "lost", "imbalance", "to one router's", "TTFT p50", "p90", "p99", "p90 to one router's"]]
    first = sides[0]
    for side in sides:
        seconds = ttft(side.answers)
        even = imbalance(side.answers, workers)
        rows.append(
            [
                side.name,
                str(len(side.answers)),
                str(len(side.lost)),
                f"{even:.2f}",
                f"{even / imbalance(first.answers, workers):.2f}",
                *(f"{percentile(seconds, share):.2f} s" for share in (0.5, 0.9, 0.99)),
                f"{percentile(seconds, 0.9) / percentile(ttft(first.answers), 0.9):.2f}",
            ]
        )
    return markdown(rows)


typer.run(main)
