"""The command: `python -m benchmarks.policy`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.policy.decisions import TARGETS, decision_seconds
from benchmarks.policy.grid import full_grid, play, play_all, quick_grid, trace_grid
from benchmarks.policy.hints import compare_hints
from benchmarks.policy.measures import TPOT_GOAL, TTFT_GOAL
from benchmarks.policy.report import CellResult, markdown, verdict
from benchmarks.policy.sides import SIDES, WITHOUT_EVENTS
from benchmarks.policy.slos import compare
from benchmarks.policy.tail import compare_tails
from simulator.fleet.sides import OURS

_HOW = f"""\
Each policy replays the same requests on the same simulated fleet: paged caches whose leaves are evicted first, chunked
prefill, batches, events that the router sees 3 to 280 ms late. All policies have the same exact knowledge of the caches
and of the requests in flight. Figures are medians over {{seeds}} seeds, the first half of each run left out. TTFT and
TPOT are times to the first token and for each one after it; goodput is answers a second that begin within
{TTFT_GOAL:g} s and go on at {1000 * TPOT_GOAL:g} ms a token or less. A load is a share of what the fleet could do if it
never computed a prefix twice; of a recorded trace, it is requests a second and worker."""


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Three cells, two seeds: less than a minute.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Replay this trace (Mooncake's format, .gz or not).")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each policy in each cell.")] = None,
    without_events: Annotated[
        bool, typer.Option(help="Compare what is known of workers by what was sent to them alone.")
    ] = False,
    slos: Annotated[
        bool, typer.Option("--promises", help="Compare how many promises are kept, by classes of requests.")
    ] = False,
    hints: Annotated[bool, typer.Option("--hints", help="Say what agents' hints are worth.")] = False,
    tail: Annotated[bool, typer.Option("--tail", help="Say why the slowest requests waited.")] = False,
    output: Annotated[Path | None, typer.Option("--markdown", help="Write the tables to this file.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw TTFT p90 (needs the extra bench).")] = None,
) -> None:
    """Compare policies on a simulated fleet, and say what a decision costs."""
    count = seeds or (2 if quick else 3)
    show = partial(print, flush=True)
    if slos or hints or tail:
        if slos:
            title, table = "Promises kept", compare(trace, quick, count, show)
        elif hints:
            title, table = "Agents' hints", compare_hints(quick, count, show)
        else:
            title, table = "The slowest requests", compare_tails(trace, quick, count, show)
        if slos or hints:  # the tables of the other were shown as they came
            print(f"\n{table}\n")
        print(f"The run took {_cpu_seconds():.0f} s of one core.")
        if output:
            output.write_text(f"# {title}\n\n{table}\n")
        return
    cells = trace_grid(trace, quick) if trace else quick_grid() if quick else full_grid()
    sides = WITHOUT_EVENTS if without_events else SIDES
    results: list[CellResult] = []
    for cell in cells:
        results.append(CellResult(cell.name, play_all(cell, sides, count, play)))
        print(results[-1].table(), end="\n\n", flush=True)
    if without_events:
        return
    summary = f"{verdict(results)}\n\n{_decisions()}\n\nThe run took {_cpu_seconds():.0f} s of one core."
    print(summary)
    if output:
        tables = [result.table() for result in results]
        output.write_text("\n\n".join(["# Policies", _HOW.format(seeds=count), summary, *tables]) + "\n")
    if picture:
        from benchmarks.policy.plot import plot

        plot(results, picture)
    if any(result.lost_to(OURS.name) for result in results):
        print(f"{OURS.name} lost to a peer in a cell.")


def _cpu_seconds() -> float:
    """What this process and those that it started have computed."""
    return sum(os.times()[:4])


def _decisions() -> str:
    costs = [decision_seconds(count) for count in TARGETS]
    rows = [["a decision, µs", *(f"{count} targets" for count in TARGETS)]]
    rows += [[side, *(f"{1e6 * cost[side]:.1f}" for cost in costs)] for side in costs[0]]
    return markdown(rows)


if __name__ == "__main__":
    typer.run(main)
