"""The effect of shared pools and of pulls between peers, beside the rules of other routers.

Each cell is a kind of sessions (`benchmarks.policy.sessions`) on a fleet at a share of saturation. The same pool stands
behind every router: engines load what they find there. Pulls happen only where the router names a peer.

    no sources   neither a pool nor pulls
    ignored      a pool that engines use and the router does not count
    kv_aware     the default policy, which counts what targets can load
    dynamo       Dynamo's cost, a pooled token at half of a cached one (`--shared-cache-multiplier`)
    llm_d        llm-d's scores, the pool at the weight of shared storage; with pulls, its P2P rule: the choice as
                 without pulls, then a pull from the longest prefix
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import mean

from benchmarks.policy.light import LightCell, generated_cell, recorded_cell
from benchmarks.policy.measures import TTFT_GOAL, in_time
from benchmarks.policy.report import markdown
from benchmarks.policy.rivals import rival
from benchmarks.policy.sessions import CHATS, CODING, SHARED_DOCUMENTS, SessionKind
from kvrouter.tools.traces.results import percentile
from simulator.fleet.fleet import Simulation
from simulator.fleet.simulated_router import OURS, Side
from simulator.fleet.sources import SourceSpec

# The tokens per second of 1 GB/s for a 70B model in bf16: 320 KiB per token.
_TOKENS_PER_GB = 1e9 / (320 * 1024)
# A pool serves half of the workers at their full rate, and holds this many tokens for each.
_POOL_TOKENS = 3_000_000
_POOLS, _PULLS = (1.5, 10.0, 50.0), (10.0, 50.0)
_TPOT_GOAL = 0.05
_WARM_UP = 0.3
_LOADS = (0.5, 0.85, 1.0)
_LARGE, _LARGE_LOADS = 32, (0.5, 0.85)
# The sessions, the load at which the default without sources answers three quarters of the requests in time, the cache
# of a worker, the tokens of a block, and the seconds of a run.
_KINDS = (
    (CODING, 1.0, 1_280_000, 512, 600.0),
    (CHATS, 1.08, 320_000, 256, 300.0),
    (SHARED_DOCUMENTS, 1.0, 320_000, 256, 300.0),
)
_SIDES = (
    replace(OURS, name="ignored"),
    replace(OURS, sources=True),
    rival("dynamo", sources=True),
    rival("llm_d", sources=True),
)


@dataclass(frozen=True, slots=True)
class SourcesRun:
    """The figures of a run: TTFT p50, p90 and p99 in seconds, the share of requests within both goals, tokens loaded.

    A request is within both goals if its first token takes at most 2 s and each further one 50 ms.
    """

    ttft: tuple[float, float, float]
    met: float
    loaded: float


def sources_of_kind(pool: bool, gigabytes: float, workers: int) -> SourceSpec:
    """Return a pool, or pulls, at a rate in GB/s for each worker."""
    rate = gigabytes * _TOKENS_PER_GB
    if pool:
        return SourceSpec(pool_tokens=_POOL_TOKENS * workers, pool_rate=rate * workers / 2, link_rate=rate)
    return SourceSpec(pulls=True, link_rate=rate)


def _cells(trace: Path | None, quick: bool) -> Iterator[LightCell]:
    """Yield the fleets without sources. `trace`: recorded sessions, in place of the generated ones."""
    if trace is not None:
        yield from (recorded_cell(trace, load, 8) for load in ((0.85,) if quick else _LOADS))
        return
    if quick:
        yield _cell(*_KINDS[0], 8, 0.85)
        return
    for kind in _KINDS:
        yield from (_cell(*kind, 8, load) for load in _LOADS)
    yield from (_cell(*_KINDS[0], _LARGE, load) for load in _LARGE_LOADS)


def _cell(
    kind: SessionKind, saturation: float, kv_tokens: int, block: int, seconds: float, workers: int, load: float
) -> LightCell:
    cell = generated_cell(kind, load * saturation, workers, seconds, kv_tokens, block)
    return replace(cell, name=f"{kind.name}, {workers} workers, {load:g} of saturation")


def _sources(quick: bool, workers: int) -> Iterator[tuple[str, SourceSpec]]:
    """Yield the name and the sources of each fleet."""
    for gigabytes in _POOLS[2:] if quick else _POOLS:
        yield f"pool {gigabytes:g} GB/s", sources_of_kind(True, gigabytes, workers)
    for gigabytes in _PULLS[1:] if quick else _PULLS:
        yield f"pulls {gigabytes:g} GB/s", sources_of_kind(False, gigabytes, workers)


def compare_sources(trace: Path | None, quick: bool, seeds: int, show: Callable[[str], None]) -> str:
    """Run all cells on all cores, and show the table of each when it is done. Return the tables: means of the seeds."""
    tables = []
    with ProcessPoolExecutor() as cores:
        for number, cell in enumerate(_cells(trace, quick)):
            sides: list[tuple[str, Side, SourceSpec | None]] = [("no sources", OURS, None)]
            for name, spec in _sources(quick, cell.fleet.workers):
                sides += [(name, side, spec) for side in _SIDES if not (spec.pulls and side.name == "ignored")]
            runs = [
                [cores.submit(_play, trace, quick, number, side, spec, seed) for seed in range(seeds)]
                for _, side, spec in sides
            ]
            rows = [[cell.name, "router", "TTFT p50", "p90", "p99", "in time", "loaded"]]
            for (name, side, _), of_side in zip(sides, runs, strict=True):
                rows.append([name, side.name, *_row([run.result() for run in of_side])])
            tables.append(markdown(rows))
            show(f"{tables[-1]}\n")
    return "\n\n".join(tables)


def _play(trace: Path | None, quick: bool, number: int, side: Side, spec: SourceSpec | None, seed: int) -> SourcesRun:
    """Replay the cell of this number before one router."""
    cell = list(_cells(trace, quick))[number]
    simulation = Simulation(replace(cell.fleet, sources=spec), side, Random(seed))
    outcomes = simulation.run(cell.requests(seed), until=cell.seconds)
    steady = [each for each in outcomes if each.request.arrival >= _WARM_UP * cell.seconds]
    ttft = [each.begun - each.request.arrival for each in steady]
    return SourcesRun(
        (percentile(ttft, 0.5), percentile(ttft, 0.9), percentile(ttft, 0.99)),
        mean(in_time(each, TTFT_GOAL, _TPOT_GOAL) for each in steady),
        sum(each.loaded for each in steady) / 1e6,
    )


def _row(runs: Sequence[SourcesRun]) -> list[str]:
    p50, p90, p99 = (mean(run.ttft[place] for run in runs) for place in range(3))
    met, loaded = mean(run.met for run in runs), mean(run.loaded for run in runs)
    return [f"{p50:.2f} s", f"{p90:.2f} s", f"{p99:.1f} s", f"{met:.3f}", f"{loaded:.1f} M"]
