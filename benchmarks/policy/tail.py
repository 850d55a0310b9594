"""The waits of the slowest 1%: our policy beside its peers where agents or long prompts make the tail.

The TTFT of a request has three parts:

    prefill   computing the uncached part of the prompt, as if the worker were idle
    held      the time from its arrival until the router sent it (`router.routing.late_binding`)
    behind    the rest: prefills and decoding of other requests on the worker, and the wait for its memory

A choice at arrival is *busy* if the worker has more tokens to compute for other requests than fit in an engine step. A
busy choice is *needless* if a worker that is not busy held as much of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, median

from benchmarks.policy.grid import Cell, play_all
from benchmarks.policy.measures import TPOT_GOAL, TTFT_GOAL, Measures, after_warm_up, in_time, measured
from benchmarks.policy.report import markdown
from benchmarks.policy.rivals import rival
from benchmarks.policy.sides import OURS_AT_ONCE
from benchmarks.policy.workloads import CONVERSATION, LOOP, TOOL
from router.apis.requests import RoutedRequest
from router.policies import Decision
from router.policies.rates import prefill_seconds
from router.routing.late_binding import should_hold
from router.settings import PolicyName, PolicySettings
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, Side, SimulatedRouter
from simulator.fleet.trace import TracedRequest

_SLOWEST_FROM = 0.99
TAIL_SIDES = (
    OURS,
    OURS_AT_ONCE,
    Side("kv_aware, γ 0.02", PolicyName.KV_AWARE, True, weights=PolicySettings(interference_per_request=0.02)),
    rival("mooncake", "Mooncake's rule"),
    *(rival(rule) for rule in ("llm_d", "lmetric", "dynamo")),
)


@dataclass(frozen=True, slots=True)
class FirstChoice:
    """The choice for a request when it arrived."""

    busy: bool
    needless: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """The parts of a request's TTFT in seconds. `computed`: the tokens of its prompt that were not cached."""

    computed: int
    prefill: float
    held: float
    behind: float
    first: FirstChoice

    @property
    def ttft(self) -> float:
        return self.prefill + self.held + self.behind


@dataclass(frozen=True, slots=True)
class TailRun:
    """One run: its figures, the share of answers within both goals (`met`), and the waits of the slowest."""

    measures: Measures
    met: float
    slowest: list[Wait]


class WatchedSimulation(Simulation):
    """A run that records what the selector would choose when a request arrives: in `first`, by the request's identity.

    A choice reserves nothing, so the recorded one does not change the run, except for the order of random ties.
    """

    def __init__(self, spec: FleetSpec, side: Side, random: Random) -> None:
        super().__init__(spec, side, random)
        self.first: dict[int, FirstChoice] = {}

    def arriving(self, outcome: Outcome, prompt: RoutedRequest, router: SimulatedRouter) -> None:
        """Record the choice for a request, before it is placed."""
        selection = router.selector.choose(prompt)
        assert selection is not None  # only limits make it None
        self.first[id(outcome.request)] = first_choice(selection.decision)


def first_choice(decision: Decision) -> FirstChoice:
    """Return whether a decision chose a busy candidate, and whether another one would have been idle for free."""
    chosen = decision.chosen
    busy = should_hold(chosen.pending)
    others = [each for each in decision.candidates if not should_hold(each.pending)]
    return FirstChoice(busy, busy and any(each.overlap >= chosen.overlap for each in others))


def tail_cells(trace: Path | None, quick: bool) -> Iterator[Cell]:
    """Return the cells: sessions, tools and conversations near saturation, or a recorded trace on two cache sizes."""
    if trace is not None:
        cells = [Cell(trace, LLAMA_70B, 8, 1_200_000, 1.2), Cell(trace, LLAMA_70B, 8, 4_000_000, 1.5)]
    else:
        cells = [
            Cell(LOOP, LLAMA_70B, 8, 600_000, 0.5),
            Cell(TOOL, LLAMA_70B, 8, 300_000, 0.75),
            Cell(TOOL, LLAMA_70B, 8, 1_200_000, 0.85),
            Cell(CONVERSATION, LLAMA_70B, 8, 300_000, 1.05),
        ]
    yield from cells[:1] if quick else cells


def play(cell: Cell, requests: Sequence[TracedRequest], side: Side, seed: int) -> TailRun:
    """Replay the requests of a cell before one router."""
    watched = WatchedSimulation(cell.fleet, side, Random(seed))
    outcomes = watched.run(requests)
    steady = after_warm_up(outcomes)
    waits = sorted((_wait(cell, watched, each) for each in steady if not each.refused), key=lambda wait: wait.ttft)
    met = mean(in_time(each, TTFT_GOAL, TPOT_GOAL) for each in steady)
    return TailRun(measured(outcomes), met, waits[int(_SLOWEST_FROM * len(waits)) :])


def _wait(cell: Cell, watched: WatchedSimulation, outcome: Outcome) -> Wait:
    request = outcome.request
    prefill = prefill_seconds(cell.profile.rates, request.input_tokens, outcome.cached, 0, 0)
    held = outcome.sent - request.arrival
    behind = outcome.begun - outcome.sent - prefill
    return Wait(request.input_tokens - outcome.cached, prefill, held, behind, watched.first[id(request)])


def compare_tails(trace: Path | None, quick: bool, seeds: int, show: Callable[[str], None]) -> str:
    """Run all cells, and show each when it is done.

    Return their tables: medians over the seeds, and means of the slowest requests.
    """
    tables = []
    for cell in tail_cells(trace, quick):
        tables.append(_table(cell.name, play_all(cell, TAIL_SIDES, seeds, play)))
        show(f"{tables[-1]}\n")
    return "\n\n".join(tables)


def _table(name: str, runs: dict[str, list[TailRun]]) -> str:
    columns = ("TTFT p90", "p99", "TPOT p90", "in time", "computed", "prefill", "held", "behind", "busy", "needless")
    rows = [[name, *columns]]
    for side, of_side in runs.items():
        waits = [wait for run in of_side for wait in run.slowest]
        rows.append(
            [
                side,
                f"{median(run.measures.ttft_p90 for run in of_side):.2f} s",
                f"{median(run.measures.ttft_p99 for run in of_side):.2f} s",
                f"{1000 * median(run.measures.tpot_p90 for run in of_side):.0f} ms",
                f"{median(run.met for run in of_side):.3f}",
                f"{mean(wait.computed for wait in waits):.0f}",
                *(f"{mean(part):.2f} s" for part in zip(*((w.prefill, w.held, w.behind) for w in waits), strict=True)),
                f"{mean(wait.first.busy for wait in waits):.0%}",
                f"{mean(wait.first.needless for wait in waits):.0%}",
            ]
        )
    return markdown(rows)
