"""Fleets at a fraction of saturation, where most run most of the day: do requests wait although workers are idle?

The sessions are those of `benchmarks.policy.sessions`. The first 30% of each run do not count. Only one comparison
begins with empty caches: the first ten seconds of a hot prefix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from statistics import mean

from benchmarks.policy.report import markdown
from benchmarks.policy.rivals import rival
from benchmarks.policy.sessions import AGENTS, CHATS, DOCUMENTS, HOT_PREFIX, SessionKind, generated, in_turn, recorded
from kvrouter.tools.traces.results import percentile
from router.policies.rates import Rates
from router.settings import PolicyName
from simulator.fleet.engine import LLAMA_70B, Profile
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, Side
from simulator.fleet.trace import TracedRequest

LOADS = (0.1, 0.2, 0.4)
LIGHT_SIDES = (
    OURS,
    *(rival(rule) for rule in ("preble", "mooncake", "lmetric")),
    *(Side(name.value, name) for name in (PolicyName.SESSION_AFFINITY, PolicyName.LEAST_LOADED)),
)
WARM_UP = 0.3
_BLOCK = 256
_KV_TOKENS = 320_000
# Sessions in turn: the tokens of a cache, and of each prompt and answer.
_SMALL_CACHE, _PROMPT, _ANSWER, _ROUNDS = 102_400, 10_000, 100, 8
# Growing sessions by turns, and the tokens of a block.
_GROWING, _GROWING_BLOCK = 19, 16
# The first seconds of a hot prefix: the requests, engines and caches of `benchmarks.light_load`.
_FIRST_SECONDS, _FIRST_RATE, _FIRST_RUNS = 10.0, 20.0, 6
_HOT_START = SessionKind(
    "hot start", _FIRST_RATE, 1, (2000, 2000), 0.0, (1, 1), (40, 0.0), (40, 0.0), (20, 0.0), pause=0.0
)
_HOT_FLEET = FleetSpec(Profile("simulated worker", Rates(0.005, 1.5e-4, 0.0, 0.0), 131_072, 64), 4, 131_072, 16)


@dataclass(frozen=True, slots=True)
class LightCell:
    """One comparison: requests by seed, and the fleet that receives them. No request begins after `seconds`."""

    name: str
    fleet: FleetSpec
    requests: Callable[[int], list[TracedRequest]]
    seconds: float = inf


@dataclass(frozen=True, slots=True)
class LightRun:
    """The figures of a run, in seconds. `answer_p90`: from the arrival to the end of the answer."""

    ttft: tuple[float, float, float]
    tpot: tuple[float, float]
    answer_p90: float
    hits: float


def play(cell: LightCell, side: Side, seed: int) -> LightRun:
    """Replay a cell before one router."""
    outcomes = Simulation(cell.fleet, side, Random(seed)).run(cell.requests(seed), until=cell.seconds)
    return figures(outcomes)


def figures(outcomes: Sequence[Outcome]) -> LightRun:
    """Return the figures of the requests after the warm-up."""
    first = outcomes[-1].request.arrival * WARM_UP
    steady = [each for each in outcomes if each.request.arrival >= first]
    ttft = [each.begun - each.request.arrival for each in steady]
    long = [each for each in steady if each.request.output_tokens > 8]
    tpot = [(each.ended - each.begun) / (each.request.output_tokens - 1) for each in long]
    return LightRun(
        (percentile(ttft, 0.5), percentile(ttft, 0.9), percentile(ttft, 0.99)),
        (percentile(tpot, 0.5), percentile(tpot, 0.9)) if tpot else (0.0, 0.0),
        percentile([each.ended - each.request.arrival for each in steady], 0.9),
        sum(each.cached for each in steady) / sum(each.request.input_tokens for each in steady),
    )


def light_cells(trace: Path | None, quick: bool, loads: Sequence[float] = LOADS) -> Iterator[LightCell]:
    """Yield the cells: every kind of sessions at every load, and sessions in turn. `trace`: recorded sessions."""
    if trace is not None:
        for load in loads:
            yield recorded_cell(trace, load, 8)
        return
    for workers in (8,) if quick else (4, 8):
        for kind in (AGENTS, CHATS, DOCUMENTS, HOT_PREFIX):
            for load in loads:
                yield generated_cell(kind, load, workers)
        for share in (0.5, 0.95, 2.0):
            yield in_turn_cell(share, 2 if workers == 4 else workers)
    yield growing_cell()
    if not quick:
        yield from (generated_cell(AGENTS, load, 32) for load in loads)


def generated_cell(
    kind: SessionKind,
    load: float,
    workers: int,
    seconds: float = 300.0,
    kv_tokens: int = _KV_TOKENS,
    block: int = _BLOCK,
) -> LightCell:
    """Return the cell of a kind of sessions at a load. `kv_tokens`: the cache of a worker, in blocks of `block`."""
    fleet = FleetSpec(LLAMA_70B, workers, kv_tokens, block)
    rate = load * workers * kind.rate
    name = f"{kind.name}, {workers} workers, load {load:g}"
    return LightCell(name, fleet, lambda seed: generated(kind, rate, seconds, block, Random(seed)), seconds)


def recorded_cell(trace: Path, load: float, workers: int, seconds: float = 600.0) -> LightCell:
    fleet = FleetSpec(LLAMA_70B, workers, 1_280_000)
    name = f"{trace.name.split('.')[0]}, {workers} workers, load {load:g}"
    return LightCell(name, fleet, lambda seed: recorded(trace, load, workers, seconds, Random(seed)), seconds)


def in_turn_cell(share: float, workers: int) -> LightCell:
    """Return sessions in turn, whose prompts and answers need a `share` of the fleet's caches."""
    sessions = int(share * workers * _SMALL_CACHE / (_PROMPT + _ANSWER))
    fleet = FleetSpec(LLAMA_70B, workers, _SMALL_CACHE, _BLOCK)
    name = f"{sessions} sessions in turn, {workers} workers, {share:g} of the caches"
    return LightCell(name, fleet, lambda _: [in_turn(sessions, _ROUNDS, _PROMPT, _ANSWER, _BLOCK)])


def growing_cell(shared: int = 64) -> LightCell:
    """Return growing sessions by turns, which fit into the caches of two workers and not into one.

    `shared`: the first tokens of all prompts.
    """
    fleet = FleetSpec(LLAMA_70B, 2, 9600, _GROWING_BLOCK)
    first = in_turn(_GROWING, _ROUNDS, shared + 500, 1, _GROWING_BLOCK, shared, more=32)
    return LightCell("growing sessions by turns, two caches", fleet, lambda _: [first])


def mean_at_the_start(side: Side, seed: int) -> float:
    """Return the mean seconds of answers in the first ten seconds of a hot prefix."""
    requests = generated(_HOT_START, _FIRST_RATE, _FIRST_SECONDS, _HOT_FLEET.block_tokens, Random(seed))
    outcomes = Simulation(_HOT_FLEET, side, Random(seed)).run(requests)
    return mean(each.ended - each.request.arrival for each in outcomes)


def compare_light(trace: Path | None, quick: bool, seeds: int, show: Callable[[str], None]) -> str:
    """Run all cells, and show the table of each when it is done. Return the tables: means over the seeds."""
    tables = []
    if trace is None:
        rows = [["first ten seconds of a hot prefix, 4 workers", "mean answer"]]
        for side in LIGHT_SIDES:
            rows.append([side.name, f"{mean(mean_at_the_start(side, seed) for seed in range(_FIRST_RUNS)):.3f} s"])
        tables.append(markdown(rows))
        show(f"{tables[-1]}\n")
    for cell in light_cells(trace, quick):
        rows = [[cell.name, "TTFT p50", "p90", "p99", "TPOT p50", "p90", "answer p90", "hits"]]
        for side in LIGHT_SIDES:
            rows.append([side.name, *_row([play(cell, side, seed) for seed in range(seeds)])])
        tables.append(markdown(rows))
        show(f"{tables[-1]}\n")
    return "\n\n".join(tables)


def _row(runs: Sequence[LightRun]) -> list[str]:
    ttft = [f"{mean(run.ttft[place] for run in runs):.3f} s" for place in range(3)]
    tpot = [f"{1000 * mean(run.tpot[place] for run in runs):.1f} ms" for place in range(2)]
    return [*ttft, *tpot, f"{mean(run.answer_p90 for run in runs):.2f} s", f"{mean(run.hits for run in runs):.3f}"]
