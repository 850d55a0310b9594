"""Why the slowest 1 % waited: our policy beside its peers where agents or long prompts make the tail.

The time to a request's first token has three parts:

    prefill   computing what its worker did not hold of the prompt, as if nothing else were there
    held      from its arrival until the router sent it (`router.routing.late_binding`)
    behind    the rest: others' prefills and decoding on the same worker, and waiting for its memory

A choice is *busy* if it has more to compute for others than an engine step takes when the request comes, and *needless*
if another worker was not, and held as much of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import mean, median

from benchmarks.policy.grid import Cell, play_all
from benchmarks.policy.report import markdown
from benchmarks.policy.workloads import CONVERSATION, LOOP, TOOL
from router.policies import Decision
from router.policies.rates import prefill_seconds
from router.routing.late_binding import should_hold
from router.settings import PolicyName, PolicySettings
from simulator.fleet.fleet import Fleet, Outcome
from simulator.fleet.measures import TPOT_GOAL, TTFT_GOAL, WARM_UP, Measures, measured
from simulator.fleet.profiles import LLAMA_70B
from simulator.fleet.sides import OURS, OURS_AT_ONCE, Side
from simulator.fleet.trace import TracedRequest

_SLOWEST_FROM = 0.99
_LEAST_TTFT = PolicySettings(interference=0.0, interference_per_request=0.0, eviction=0.0, context=0.0)
TAIL_SIDES = (
    OURS,
    OURS_AT_ONCE,
    Side("kv_aware, γ 0.02", PolicyName.KV_AWARE, True, weights=PolicySettings(interference_per_request=0.02)),
    Side("Mooncake's rule", PolicyName.KV_AWARE, weights=_LEAST_TTFT),
    *(Side(name.value, name) for name in (PolicyName.LLM_D, PolicyName.LMETRIC, PolicyName.DYNAMO)),
)


@dataclass(frozen=True, slots=True)
class FirstChoice:
    """What the choice was when a request came."""

    busy: bool
    needless: bool


@dataclass(frozen=True, slots=True)
class Wait:
    """One request's time to its first token, in seconds. `computed`: tokens of its prompt."""

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
    """One run: its measures, the share of answers within both goals, and the waits of the slowest."""

    measures: Measures
    in_time: float
    slowest: list[Wait]


class WatchedFleet(Fleet):
    """A fleet that remembers the first choice for every request, in `first`, by the request's identity."""

    first: dict[int, FirstChoice]

    def run(self, requests: Sequence[TracedRequest], on_arrival: Callable[[], None] = lambda: None) -> list[Outcome]:
        self.first = {}
        return super().run(requests, on_arrival)

    def _decide(self, request: TracedRequest) -> Decision:
        decision = super()._decide(request)
        if id(request) not in self.first:
            chosen = decision.chosen
            busy = should_hold(chosen.pending)
            others = [each for each in decision.candidates if not should_hold(each.pending)]
            needless = busy and any(each.overlap >= chosen.overlap for each in others)
            self.first[id(request)] = FirstChoice(busy, needless)
        return decision


def tail_cells(trace: Path | None, quick: bool) -> Iterator[Cell]:
    """Sessions, tools, and conversations beyond saturation; with a recorded trace, that on small and large caches."""
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
    """One policy in one cell."""
    random = Random(seed)
    choose = side.policy_for(random)
    fleet = WatchedFleet(cell.profile, cell.workers, cell.kv_tokens, choose, side.late_binding, random)
    outcomes = fleet.run(requests)
    steady = [each for each in outcomes if each.request.arrival >= WARM_UP * outcomes[-1].request.arrival]
    waits = sorted((_wait(cell, fleet, each) for each in steady), key=lambda wait: wait.ttft)
    in_time = mean(_in_time(each) for each in steady)
    return TailRun(measured(outcomes), in_time, waits[int(_SLOWEST_FROM * len(waits)) :])


def _wait(cell: Cell, fleet: WatchedFleet, outcome: Outcome) -> Wait:
    request = outcome.request
    prefill = prefill_seconds(cell.profile.rates, request.input_tokens, outcome.cached, 0, 0)
    held = outcome.sent - request.arrival
    behind = outcome.begun - outcome.sent - prefill
    return Wait(request.input_tokens - outcome.cached, prefill, held, behind, fleet.first[id(request)])


def _in_time(outcome: Outcome) -> bool:
    first = outcome.begun - outcome.request.arrival
    each = (outcome.ended - outcome.begun) / max(outcome.request.output_tokens - 1, 1)
    return first <= TTFT_GOAL and each <= TPOT_GOAL


def compare_tails(trace: Path | None, quick: bool, seeds: int, show: Callable[[str], None]) -> str:
    """All cells; each is shown as it is done. Returns their tables: medians over the seeds, means of the slowest."""
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
                f"{median(run.in_time for run in of_side):.3f}",
                f"{mean(wait.computed for wait in waits):.0f}",
                *(f"{mean(part):.2f} s" for part in zip(*((w.prefill, w.held, w.behind) for w in waits), strict=True)),
                f"{mean(wait.first.busy for wait in waits):.0%}",
                f"{mean(wait.first.needless for wait in waits):.0%}",
            ]
        )
    return markdown(rows)
