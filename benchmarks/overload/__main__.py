"""Compare admission beyond saturation, in virtual time: `make bench-overload`.

Each cell is a load on a fleet, and each row a rule of admission before it. The requests are those of
`benchmarks.overload.workload`. `--quick` takes a minute: two workers, 200 seconds, one seed.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from random import Random
from statistics import mean
from typing import Annotated, Final

import typer

from benchmarks.overload import rivals
from benchmarks.overload.measures import OverloadRun, measured
from benchmarks.overload.workload import BLOCK, HIGH, KV_TOKENS, LOW, requests
from benchmarks.policy.report import markdown
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, Side

LOADS: Final = (0.9, 1.0, 1.2, 2.0, 5.0)
# The requests in flight of each worker that an operator might set by hand: what fits its memory on average.
_HAND_SET: Final = 48
SIDES: Final = (
    replace(OURS, name="auto", requests="auto"),
    replace(OURS, name="no limit"),
    replace(OURS, name=f"{_HAND_SET} by hand", requests=_HAND_SET),
    *rivals.SIDES,
)
_COLUMNS: Final = (
    *("goodput", "answered", "arrived", "high TTFT p50", "p99", "normal p50", "p99", "low p50", "p99"),
    *("refused high", "normal", "low", "true Retry-After", "preemptions", "computed again"),
)


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a cell: workers, seconds and seeds.

    - `pairs`: one half of the workers prefills, the other one decodes.
    """

    workers: int
    seconds: float
    seeds: int
    pairs: bool = False

    @property
    def fleet(self) -> FleetSpec:
        """The engines."""
        half = self.workers // 2 if self.pairs else 0
        return FleetSpec(LLAMA_70B, self.workers, KV_TOKENS, BLOCK, prefill=half, decode=half)

    def __str__(self) -> str:
        return f"{self.workers // 2}P{self.workers // 2}D" if self.pairs else f"{self.workers} workers"


QUICK: Final = Size(2, 200.0, 1)


class _SentAgain(Simulation):
    """A run in which each refused request is sent again, once."""

    def comes_again(self, outcome: Outcome) -> bool:
        return not outcome.sent_again


def play(side: Side, load: float, size: Size, seed: int, again: bool = False) -> OverloadRun:
    """Run a cell before one rule. `again`: refused requests are sent again after their `Retry-After`, once."""
    simulation = (_SentAgain if again else Simulation)(size.fleet, side, Random(seed))
    outcomes = simulation.run(requests(load, size.workers, size.seconds, seed))
    return measured(simulation, outcomes, size.seconds)


def row(name: str, runs: list[OverloadRun]) -> list[str]:
    """Return a rule's row of a table: means of the seeds."""

    def seconds(priority: int, place: int) -> str:
        return f"{mean(run.ttft[priority][place] for run in runs):.2f} s"

    return [
        name,
        *(f"{mean(getattr(run, rate) for run in runs):.2f}/s" for rate in ("goodput", "answered", "arrived")),
        *(seconds(priority, place) for priority in (HIGH, 0, LOW) for place in (0, 1)),
        *(f"{mean(run.refused[priority] for run in runs):.2f}" for priority in (HIGH, 0, LOW)),
        f"{mean(run.true for run in runs):.2f}",
        f"{mean(run.preemptions for run in runs):.0f}",
        f"{mean(run.recomputed for run in runs):.0f}",
    ]


def main(
    quick: Annotated[bool, typer.Option(help="Two workers and one seed.")] = False,
    workers: int = 8,
    seconds: float = 600.0,
    seeds: int = 3,
    load: Annotated[list[float] | None, typer.Option(help="A load; several are possible.")] = None,
    side: Annotated[list[str] | None, typer.Option(help="A rule by its name; several are possible.")] = None,
    pairs: Annotated[bool, typer.Option(help="One half of the workers prefills, the other one decodes.")] = False,
    again: Annotated[bool, typer.Option(help="Send refused requests again after Retry-After, once.")] = False,
) -> None:
    """Print a table for each load."""
    names = [rule.name for rule in SIDES]
    for name in side or []:
        if name not in names:
            raise typer.BadParameter(f"{name} is none of {', '.join(names)}", param_hint="--side")
    size = QUICK if quick else Size(workers, seconds, seeds, pairs)
    for each in load or LOADS:
        rows = [[f"load {each:g}, {size}", *_COLUMNS]]
        for rule in SIDES if side is None else [SIDES[names.index(name)] for name in side]:
            runs = []
            for seed in range(size.seeds):
                runs.append(play(rule, each, size, seed, again))
                gc.collect()
            rows.append(row(rule.name, runs))
        print(markdown(rows), flush=True)
        print(flush=True)


if __name__ == "__main__":
    typer.run(main)
