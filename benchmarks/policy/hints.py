"""What agents' hints are worth: this project's default with and without them, on the same made-up traces.

Every request tells whether its session goes on and, roughly, when it comes back: announced pauses are off by half
(`simulator.fleet.hinted_fleet`). In the mixed cells half of the work is single requests with long prompts,
which come once and tell that they are their session's last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from statistics import mean, median

from benchmarks.policy.grid import Cell
from benchmarks.policy.report import markdown
from benchmarks.policy.workloads import AGENT, CONVERSATION, SINGLE
from simulator.fleet.fleet import Fleet, Outcome
from simulator.fleet.hinted_fleet import HintedFleet
from simulator.fleet.measures import WARM_UP, Measures, measured
from simulator.fleet.profiles import LLAMA_70B
from simulator.fleet.sides import OURS
from simulator.fleet.trace import TracedRequest, requests_of


@dataclass(frozen=True, slots=True)
class Ground:
    """Workloads that share a fleet."""

    cells: tuple[Cell, ...]

    @property
    def name(self) -> str:
        if len(self.cells) == 1:
            return self.cells[0].name
        what = " and ".join(f"{cell.workload_name} {cell.load:g}" for cell in self.cells)
        return f"{what}, {self.cells[0].fleet_name}"

    def requests(self, seed: int) -> list[TracedRequest]:
        """What comes, in the order of arrival."""
        lines = []
        for number, cell in enumerate(self.cells):
            for line in cell.lines(len(self.cells) * seed + number):
                line.hash_ids = [len(self.cells) * block + number for block in line.hash_ids]
                line.session_id = f"{number}-{line.session_id}"
                lines.append(line)
        return requests_of(lines)


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `ttft`: the mean, in seconds."""

    measures: Measures
    ttft: float


def grounds(quick: bool) -> Iterator[Ground]:
    """Below saturation and near it, by agents alone and beside others."""
    both = (Cell(AGENT, LLAMA_70B, 8, 300_000, 0.25), Cell(SINGLE, LLAMA_70B, 8, 300_000, 0.45))
    if quick:
        yield Ground((Cell(AGENT, LLAMA_70B, 8, 300_000, 0.4),))
        yield Ground(both)
        return
    for kv_tokens, loads in ((1_200_000, (0.7, 0.9)), (300_000, (0.2, 0.3, 0.35, 0.4))):
        for load in loads:
            yield Ground((Cell(AGENT, LLAMA_70B, 8, kv_tokens, load),))
    yield Ground((Cell(AGENT, LLAMA_70B, 8, 300_000, 0.2), Cell(SINGLE, LLAMA_70B, 8, 300_000, 0.35)))
    yield Ground(both)
    for load in (0.8, 1.05):
        yield Ground((Cell(CONVERSATION, LLAMA_70B, 8, 300_000, load),))


def play(ground: Ground, requests: list[TracedRequest], hints: bool, seed: int) -> Run:
    """One run, with or without hints."""
    cell, random = ground.cells[0], Random(seed)
    fleet = (cell.profile, cell.workers, cell.kv_tokens, OURS.policy_for(random), OURS.late_binding, random)
    outcomes = (HintedFleet(*fleet, requests) if hints else Fleet(*fleet)).run(requests)
    return Run(measured(outcomes), mean(_ttft(outcomes)))


def _ttft(outcomes: list[Outcome]) -> list[float]:
    steady = WARM_UP * outcomes[-1].request.arrival
    return [each.begun - each.request.arrival for each in outcomes if each.request.arrival >= steady]


def compare_hints(quick: bool, seeds: int, show: Callable[[str], None]) -> str:
    """All cells; each is shown as it is done. Returns the table: medians, and that of the ratios of the same trace."""
    rows = [["without hints, with hints", "hit rate", "TTFT, mean", "TTFT p90", "TTFT p99", "goodput", "mean, ratio"]]
    for ground in grounds(quick):
        without, with_hints = list[Run](), list[Run]()
        for seed in range(seeds):
            requests = ground.requests(seed)
            without.append(play(ground, requests, False, seed))
            with_hints.append(play(ground, requests, True, seed))
        rows.append([ground.name, *_told(without, with_hints)])
        show(str(rows[-1]))
    return markdown(rows)


def _told(without: list[Run], with_hints: list[Run]) -> list[str]:
    def both(value: Callable[[Run], float], form: str) -> str:
        return ", ".join(format(median(map(value, runs)), form) for runs in (without, with_hints))

    ratios = [b.ttft / a.ttft for a, b in zip(without, with_hints, strict=True)]
    return [
        both(lambda run: run.measures.hit_rate, ".3f"),
        both(lambda run: run.ttft, ".2f") + " s",
        both(lambda run: run.measures.ttft_p90, ".2f") + " s",
        both(lambda run: run.measures.ttft_p99, ".2f") + " s",
        both(lambda run: run.measures.goodput, ".1f") + "/s",
        f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
    ]
