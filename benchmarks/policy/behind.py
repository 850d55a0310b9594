"""The cells in which the default policy is not first, by how much, and whether all seeds agree.

Every rule plays the first seed of each cell. The default and the six nearest rules of a cell play the others, too. So
does the default that ignores a pool, if the cell has one. A rule is *ahead* if it is better in all seeds and by more
than 2% in the mean. Figures are of the requests after the first 30% of a run:

    answer p90   seconds from the arrival to the end of the answer
    TTFT p90     seconds from the arrival to the first token
    in time      share of requests with a first token within 2 s, and 50 ms for each further one
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean
from typing import Final

from benchmarks.policy.light import WARM_UP, LightCell, figures, generated_cell, recorded_cell
from benchmarks.policy.measures import TTFT_GOAL, in_time
from benchmarks.policy.report import markdown
from benchmarks.policy.rivals import RIVALS, rival
from benchmarks.policy.sessions import AGENTS, CHATS, CODING, DOCUMENTS, SHARED_DOCUMENTS, SessionKind
from benchmarks.policy.sources import sources_of_kind
from router.settings import PolicyName
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import Simulation
from simulator.fleet.simulated_router import OURS, PLAIN, Knowledge, Side

NEAREST: Final = 6
_TPOT_GOAL: Final = 0.05
_NOISE: Final = 0.02
_WORKERS: Final = 8
# The sessions, the cache of a worker, the tokens of a block, and the seconds of a run.
_KINDS: dict[str, tuple[SessionKind, int, int, float]] = {
    "agents": (AGENTS, 320_000, 256, 240.0),
    "coding": (CODING, 1_280_000, 512, 480.0),
    "conversations": (CHATS, 320_000, 256, 240.0),
    "documents": (DOCUMENTS, 320_000, 256, 240.0),
    "shared documents": (SHARED_DOCUMENTS, 320_000, 256, 240.0),
}
_RECORDED: Final = "recorded"
_RECORDED_SECONDS: Final = 480.0
GRID: tuple[str, ...] = (
    *(f"agents@{load}" for load in (0.2, 0.4, 0.7, 0.95)),
    *(f"coding@{load}" for load in (0.1, 0.25, 0.5, 0.85)),
    *(f"conversations@{load}" for load in (0.2, 0.95, 1.0)),
    *(f"documents@{load}" for load in (0.2, 0.95)),
    *(f"coding, pool {rate}@{load}" for rate in (10, 50) for load in (0.7, 0.85)),
)
RECORDED_GRID: tuple[str, ...] = tuple(f"{_RECORDED}@{load}" for load in (0.1, 0.25, 0.5, 0.85))
_SENT = Side("cache_aware, sent", PolicyName.CACHE_AWARE, knowledge=Knowledge.SENT)
_WITHOUT_POOL = "kv_aware, pool ignored"
# Rules that count what a pool holds.
_POOLED = ("dynamo", "llm_d", "mooncake")
SIDES: dict[str, Side] = {
    side.name: side for side in (OURS, *map(rival, RIVALS), *PLAIN, _SENT, replace(OURS, name=_WITHOUT_POOL))
}


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a run. `best`: `min` or `max`. `worse`: how much worse one is than another, as a share of it."""

    name: str
    of: Callable[[BehindRun], float]
    best: Callable[[Iterable[float]], float]
    text: str

    def worse(self, ours: float, other: float) -> float:
        return (ours - other if self.best is min else other - ours) / max(other, 1e-9)


@dataclass(frozen=True, slots=True)
class BehindRun:
    """The figures of a run, in seconds and shares."""

    answer_p90: float
    ttft_p90: float
    tpot_p90: float
    in_time: float
    hits: float


MEASURES = (
    Measure("answer p90", lambda run: run.answer_p90, min, "{:.2f} s"),
    Measure("TTFT p90", lambda run: run.ttft_p90, min, "{:.2f} s"),
    Measure("in time", lambda run: run.in_time, max, "{:.3f}"),
)


def cell_named(name: str, trace: Path | None = None) -> LightCell:
    """Return a cell by its name: `KIND[, pool RATE][, N workers][, unlike]@LOAD`. Raises ValueError.

    - `RATE`: of a shared pool, in GB/s a worker.
    - `unlike`: two workers have half the speed.
    - `trace`: recorded sessions, for the kind `recorded`.
    """
    what, _, load = name.rpartition("@")
    kind, *options = what.split(", ")
    if not load or (kind not in _KINDS and (kind != _RECORDED or trace is None)):
        known = ", ".join([*_KINDS, _RECORDED])
        raise ValueError(f"{name!r} is no cell: write KIND@LOAD with one of {known} (recorded: with --trace)")
    workers = next((int(option.split()[0]) for option in options if option.endswith(" workers")), _WORKERS)
    if kind == _RECORDED and trace is not None:
        cell = recorded_cell(trace, float(load), workers, _RECORDED_SECONDS)
    else:
        sessions, kv_tokens, block, seconds = _KINDS[kind]
        cell = generated_cell(sessions, float(load), workers, seconds, kv_tokens, block)
    fleet = cell.fleet
    for option in options:
        if option.startswith("pool "):
            fleet = replace(fleet, sources=sources_of_kind(True, float(option.split()[1]), workers))
        elif option == "unlike":
            rates = LLAMA_70B.rates
            slow = type(rates)(*(2 * rate for rate in (rates.step, rates.token, rates.attention, rates.context_token)))
            fleet = replace(fleet, unlike=(replace(LLAMA_70B, rates=slow),) * 2)
        elif not option.endswith(" workers"):
            raise ValueError(f"{option!r} in {name!r} is no option: write pool RATE, N workers, or unlike")
    return replace(cell, name=name, fleet=fleet)


def side_for(name: str, cell: LightCell) -> Side:
    """Return a router by its name in `SIDES`. If the cell has a pool, rules that know pools count it."""
    side = SIDES[name]
    knows = name == OURS.name or name in _POOLED
    return replace(side, sources=True) if knows and cell.fleet.sources is not None else side


def play(cell: LightCell, name: str, seed: int) -> BehindRun:
    """Replay a cell before the router with this name."""
    outcomes = Simulation(cell.fleet, side_for(name, cell), Random(seed)).run(cell.requests(seed), until=cell.seconds)
    run, first = figures(outcomes), outcomes[-1].request.arrival * WARM_UP
    steady = [each for each in outcomes if each.request.arrival >= first]
    met = mean(in_time(each, TTFT_GOAL, _TPOT_GOAL) for each in steady)
    return BehindRun(run.answer_p90, run.ttft[1], run.tpot[1], met, run.hits)


def _play_named(cell: str, trace: Path | None, side: str, seed: int) -> BehindRun:
    return play(cell_named(cell, trace), side, seed)


def nearest(runs: dict[str, list[BehindRun]], ours: str, count: int) -> list[str]:
    """Return the rules that are the furthest ahead, or the least behind, in their best measure of the first seed."""

    def lead(name: str) -> float:
        return max(measure.worse(measure.of(runs[ours][0]), measure.of(runs[name][0])) for measure in MEASURES)

    return sorted((name for name in runs if name != ours), key=lead, reverse=True)[:count]


def verdicts(runs: dict[str, list[BehindRun]], ours: str = OURS.name) -> list[tuple[str, str, float, bool]]:
    """Return what is better than ours by more than 2% in the mean: measure, rule, the share, whether all seeds agree.

    There is at most one rule for each measure: the best that is ahead in all seeds, or else the best that is ahead in
    the mean. Rules that played fewer seeds do not count.
    """
    found = []
    for measure in MEASURES:
        behind = []
        for name, of_rule in runs.items():
            if name == ours or len(of_rule) < len(runs[ours]):
                continue
            pairs = [(measure.of(mine), measure.of(other)) for mine, other in zip(runs[ours], of_rule, strict=True)]
            share = measure.worse(mean(mine for mine, _ in pairs), mean(other for _, other in pairs))
            if share > _NOISE:
                behind.append((all(measure.worse(*pair) > 0 for pair in pairs), share, name))
        if behind:
            agree, share, name = max(behind)
            found.append((measure.name, name, share, agree))
    return found


def table(name: str, runs: dict[str, list[BehindRun]]) -> str:
    """Return the figures of a cell: means over the seeds."""
    rows = [[name, "seeds", *(measure.name for measure in MEASURES), "TPOT p90", "hits"]]
    for side, of_side in runs.items():
        figures = [measure.text.format(mean(measure.of(run) for run in of_side)) for measure in MEASURES]
        tpot, hits = (mean(values) for values in zip(*((run.tpot_p90, run.hits) for run in of_side), strict=True))
        rows.append([side, str(len(of_side)), *figures, f"{1000 * tpot:.1f} ms", f"{hits:.3f}"])
    return markdown(rows)


def summary(cells: dict[str, dict[str, list[BehindRun]]]) -> str:
    """Return the cells in which the default is not first; and a sentence if it is first in all."""
    rows = [["cell", "measure", "rule", "ahead by", "seeds"]]
    for cell, runs in cells.items():
        for measure, side, share, agree in verdicts(runs):
            rows.append([cell, measure, side, f"{100 * share:.1f}%", "all agree" if agree else "differ"])
    return markdown(rows) if len(rows) > 1 else f"{OURS.name} is first, or level with the first, in every cell."


def compare_behind(
    trace: Path | None, cells: Sequence[str], sides: Sequence[str], seeds: int, show: Callable[[str], None]
) -> str:
    """Play cells before routers on all cores, and show each cell's table. Return these, and the summary first."""
    names = tuple(cells) or (GRID if trace is None else (*GRID, *RECORDED_GRID))
    chosen = list(dict.fromkeys((OURS.name, *(sides or SIDES))))
    for name in chosen:
        if name not in SIDES:
            raise ValueError(f"{name!r} is no router: use one of {', '.join(SIDES)}")
    results: dict[str, dict[str, list[BehindRun]]] = {}
    with ProcessPoolExecutor() as cores:
        for name in names:
            pooled = cell_named(name, trace).fleet.sources is not None
            among = [side for side in chosen if pooled or side != _WITHOUT_POOL]
            first = {side: cores.submit(_play_named, name, trace, side, 0) for side in among}
            runs = {side: [run.result()] for side, run in first.items()}
            always = [side for side in (OURS.name, _WITHOUT_POOL) if side in among]
            again = dict.fromkeys([*always, *nearest(runs, OURS.name, NEAREST)])
            later = [(s, cores.submit(_play_named, name, trace, s, seed)) for seed in range(1, seeds) for s in again]
            for side, run in later:
                runs[side].append(run.result())
            results[name] = runs
            show(f"{table(name, runs)}\n")
    shown = summary(results)
    show(shown)
    return "\n\n".join([shown, *(table(name, runs) for name, runs in results.items())])
