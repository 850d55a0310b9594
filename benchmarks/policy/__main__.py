"""The command: `python -m benchmarks.policy`."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.policy.behind import compare_behind
from benchmarks.policy.decisions import TARGETS, decision_seconds
from benchmarks.policy.disaggregated import compare_pairs
from benchmarks.policy.grid import full_grid, play, play_all, quick_grid, trace_grid
from benchmarks.policy.hints import compare_hints
from benchmarks.policy.light import compare_light
from benchmarks.policy.measures import TPOT_GOAL, TTFT_GOAL
from benchmarks.policy.report import CellResult, markdown, verdict
from benchmarks.policy.sides import SIDES, WITHOUT_EVENTS
from benchmarks.policy.slos import compare
from benchmarks.policy.sources import compare_sources
from benchmarks.policy.tail import compare_tails
from simulator.fleet.simulated_router import OURS, side_named, side_with

_HOW = f"""\
The router's own selection and admission run in virtual time before simulated engines. These have paged caches that
evict leaves first, chunked prefill, batches, and events that reach the router after 3 to 280 ms. All policies receive
the same events and metrics. Figures are medians over {{seeds}} seeds, without the first half of each run. Goodput is
the answers a second that begin within {TTFT_GOAL:g} s and continue at {1000 * TPOT_GOAL:g} ms a token or less. A load
is a share of what the fleet could serve if it never computed a prefix twice. The load of a recorded trace is in
requests a second and worker."""


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Three cells, two seeds: some minutes.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Replay this trace (Mooncake's format, .gz or not).")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of each policy in each cell.")] = None,
    without_events: Annotated[bool, typer.Option(help="Compare routers whose workers report no events.")] = False,
    slos: Annotated[
        bool, typer.Option("--slos", help="Compare the share of SLOs met, by classes of requests.")
    ] = False,
    hints: Annotated[bool, typer.Option("--hints", help="Show the effect of agents' hints.")] = False,
    sources: Annotated[bool, typer.Option("--sources", help="Show the effect of pools and of pulls.")] = False,
    light: Annotated[bool, typer.Option("--light", help="Compare policies at light load.")] = False,
    behind: Annotated[
        bool, typer.Option("--behind", help="Show the cells in which kv_aware is not first. Half an hour.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--cell", help="With --behind, play this cell only; repeatable.")
    ] = None,
    rules: Annotated[
        list[str] | None, typer.Option("--side", help="With --behind, play this rule only; repeatable.")
    ] = None,
    tail: Annotated[bool, typer.Option("--tail", help="Show the waits of the slowest requests.")] = False,
    disaggregated: Annotated[
        bool, typer.Option("--disaggregated", help="Compare choices of prefill and decode workers.")
    ] = False,
    policy: Annotated[
        list[str] | None, typer.Option(help="Compare another policy too: package.module:function; repeatable.")
    ] = None,
    extra: Annotated[list[str] | None, typer.Option(help="Compare kv_aware with this scorer too; repeatable.")] = None,
    output: Annotated[Path | None, typer.Option("--markdown", help="Write the tables to this file.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw TTFT p90 (needs the extra bench).")] = None,
) -> None:
    """Compare policies on a simulated fleet, and measure the processor time of a decision."""
    count = seeds or (2 if quick else 3)
    show = partial(print, flush=True)
    if slos or hints or tail or sources or light or behind or disaggregated:
        if slos:
            title, table = "SLOs met", compare(trace, quick, count, show)
        elif hints:
            title, table = "Agents' hints", compare_hints(quick, count, show)
        elif sources:
            title, table = "Pools and peers", compare_sources(trace, quick, count, show)
        elif light:
            title, table = "Light load", compare_light(trace, quick, count, show)
        elif behind:
            title, table = "Not first", compare_behind(trace, only or (), rules or (), count, show)
        elif disaggregated:
            title, table = "Prefill and decode workers", compare_pairs(trace, quick, count, show)
        else:
            title, table = "The slowest requests", compare_tails(trace, quick, count, show)
        if slos or hints:  # the other tables were shown when each was done
            print(f"\n{table}\n")
        print(f"The run took {_cpu_seconds():.0f} s of one core.")
        if output:
            output.write_text(f"# {title}\n\n{table}\n")
        return
    cells = trace_grid(trace, quick) if trace else quick_grid() if quick else full_grid()
    own = [side_named(name) for name in policy or ()] + [side_with(name) for name in extra or ()]
    sides = [*(WITHOUT_EVENTS if without_events else SIDES), *own]
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
    """Return the processor time of this process and of its ended children."""
    return sum(os.times()[:4])


def _decisions() -> str:
    costs = [decision_seconds(count) for count in TARGETS]
    rows = [["a decision, µs", *(f"{count} targets" for count in TARGETS)]]
    rows += [[side, *(f"{1e6 * cost[side]:.1f}" for cost in costs)] for side in costs[0]]
    return markdown(rows)


if __name__ == "__main__":
    typer.run(main)
