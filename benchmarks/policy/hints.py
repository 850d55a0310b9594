"""The effect of agents' hints: this project's default with and without them, on the same generated traces.

Every request reports whether its session continues, and after which pause. The reported pauses are off by half. In the
mixed cells, half of the work is single requests with long prompts. Each of them reports that it is the last of its
session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean, median

from benchmarks.policy.grid import Cell
from benchmarks.policy.measures import Measures, after_warm_up, measured
from benchmarks.policy.report import markdown
from benchmarks.policy.workloads import AGENT, CONVERSATION, SINGLE
from router.apis.agent_hints import AgentHints
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import Outcome, Simulation
from simulator.fleet.simulated_router import OURS
from simulator.fleet.trace import TracedRequest, requests_of

_HINTED = replace(OURS, hints=True)
# An answer takes about this many seconds a token. The rest of the time to the next request is the reported pause.
_TOKEN_SECONDS = 0.02
_PAUSE_ERROR = 0.5


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
        """Return the requests of all workloads in the order of their arrival."""
        lines = []
        for number, cell in enumerate(self.cells):
            for line in cell.lines(len(self.cells) * seed + number):
                line.hash_ids = [len(self.cells) * block + number for block in line.hash_ids]
                line.session_id = f"{number}-{line.session_id}"
                lines.append(line)
        return requests_of(lines)


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `ttft`: the mean TTFT in seconds."""

    measures: Measures
    ttft: float


def grounds(quick: bool) -> Iterator[Ground]:
    """Return the cells: agents below and near saturation, agents beside single requests, and conversations."""
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


def hinted(requests: Sequence[TracedRequest], error: float = _PAUSE_ERROR) -> list[TracedRequest]:
    """Return the requests with hints: whether the session continues, and the pause after the answer.

    `error`: the standard deviation of the logarithm by which the pauses are off.
    """
    random = Random(0)
    following: dict[str, TracedRequest] = {}
    with_hints: list[TracedRequest] = []
    for request in reversed(requests):
        after = following.get(request.session)
        hints = AgentHints(final=True)
        if after is not None:
            pause = after.arrival - request.arrival - _TOKEN_SECONDS * request.output_tokens
            hints = AgentHints(next_call=max(pause, 0.0) * random.lognormvariate(0.0, error))
        following[request.session] = request
        with_hints.append(replace(request, hints=hints))
    return with_hints[::-1]


def play(ground: Ground, requests: Sequence[TracedRequest], seed: int) -> Run:
    """Replay requests, with the hints that they have."""
    outcomes = Simulation(ground.cells[0].fleet, _HINTED, Random(seed)).run(requests)
    return Run(measured(outcomes), mean(_ttft(outcomes)))


def _ttft(outcomes: list[Outcome]) -> list[float]:
    return [each.begun - each.request.arrival for each in after_warm_up(outcomes)]


def compare_hints(quick: bool, seeds: int, show: Callable[[str], None]) -> str:
    """Run all cells, and show each when it is done.

    Return the table: medians, and the median ratio of the two runs of a trace.
    """
    rows = [["without hints, with hints", "hit rate", "TTFT, mean", "TTFT p90", "TTFT p99", "goodput", "mean, ratio"]]
    for ground in grounds(quick):
        without, with_hints = list[Run](), list[Run]()
        for seed in range(seeds):
            requests = ground.requests(seed)
            without.append(play(ground, requests, seed))
            with_hints.append(play(ground, hinted(requests), seed))
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
