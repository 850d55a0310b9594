"""The effect of shared pools and of pulls between peers, beside the rules of other routers.

Each cell is agentic coding on 8 workers. The same pool stands behind every router: engines load what they find there.
Pulls happen only where the router names a peer.

    no sources   neither a pool nor pulls
    ignored      a pool that engines use and the router does not count
    kv_aware     the default policy, which counts what targets can load
    dynamo       Dynamo's cost, a pooled token at half of a cached one (`--shared-cache-multiplier`)
    llm_d        llm-d's scores, the pool at the weight of shared storage; with pulls, its P2P rule: the choice as
                 without pulls, then a pull from the longest prefix
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import mean

from benchmarks.policy.grid import Cell, play_all
from benchmarks.policy.measures import TTFT_GOAL, Measures, after_warm_up, in_time, measured
from benchmarks.policy.report import markdown
from benchmarks.policy.workloads import CODING
from router.settings import PolicyName
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import Simulation
from simulator.fleet.simulated_router import OURS, Side
from simulator.fleet.sources import SourceSpec
from simulator.fleet.trace import TracedRequest

# The tokens per second of 1 GB/s for a 70B model in bf16: 320 KiB per token.
_TOKENS_PER_GB = 1e9 / (320 * 1024)
# A pool serves this many workers at their full rate.
_POOL_WORKERS = 4
_POOL_TOKENS = 24_000_000
_TPOT_GOAL = 0.1
_SIDES = [
    Side("ignored", PolicyName.KV_AWARE, late_binding=True),
    Side("kv_aware", PolicyName.KV_AWARE, late_binding=True, sources=True),
    Side("dynamo", PolicyName.DYNAMO, sources=True),
    Side("llm_d", PolicyName.LLM_D, sources=True),
]


@dataclass(frozen=True, slots=True)
class SourcesRun:
    """The figures of a run: `met`, the share of requests within both goals, and the millions of tokens loaded."""

    measures: Measures
    met: float
    loaded: float


def sources_of_kind(pool: bool, gigabytes: float) -> SourceSpec:
    """Return a pool, or pulls, at a rate in GB/s for each worker."""
    rate = gigabytes * _TOKENS_PER_GB
    if pool:
        return SourceSpec(pool_tokens=_POOL_TOKENS, pool_rate=_POOL_WORKERS * rate, link_rate=rate)
    return SourceSpec(pulls=True, link_rate=rate)


def _kinds(quick: bool) -> Iterator[tuple[str, SourceSpec]]:
    """Yield the name and the sources of each fleet."""
    for gigabytes in (50.0,) if quick else (1.5, 10.0, 50.0):
        yield f"pool {gigabytes:g} GB/s", sources_of_kind(True, gigabytes)
    for gigabytes in () if quick else (10.0, 50.0):
        yield f"pulls {gigabytes:g} GB/s", sources_of_kind(False, gigabytes)


def compare_sources(quick: bool, seeds: int, show: Callable[[str], None]) -> str:
    """Run all loads, and show the table of each when it is done. Return the tables."""
    tables = []
    for load in (0.3,) if quick else (0.2, 0.3, 0.35):
        cell = Cell(CODING, LLAMA_70B, 8, 1_200_000, load, seconds=500.0)
        rows = [[cell.name, "router", "TTFT p50", "p90", "p99", "in time", "loaded"]]
        rows += _rows("no sources", play_all(cell, [replace(OURS, name="kv_aware")], seeds, _player(None)))
        for name, spec in _kinds(quick):
            sides = [side for side in _SIDES if not (spec.pulls and side.name == "ignored")]
            rows += _rows(name, play_all(cell, sides, seeds, _player(spec)))
        tables.append(markdown(rows))
        show(f"{tables[-1]}\n")
    return "\n\n".join(tables)


def _player(spec: SourceSpec | None) -> Callable[[Cell, Sequence[TracedRequest], Side, int], SourcesRun]:
    def play(cell: Cell, requests: Sequence[TracedRequest], side: Side, seed: int) -> SourcesRun:
        outcomes = Simulation(replace(cell.fleet, sources=spec), side, Random(seed)).run(requests)
        steady = after_warm_up(outcomes)
        met = mean(in_time(each, TTFT_GOAL, _TPOT_GOAL) for each in steady)
        return SourcesRun(measured(outcomes), met, sum(each.loaded for each in steady) / 1e6)

    return play


def _rows(name: str, runs: dict[str, list[SourcesRun]]) -> Iterator[list[str]]:
    for side, of_side in runs.items():
        measures = [run.measures for run in of_side]
        yield [
            name,
            side,
            f"{mean(each.ttft_p50 for each in measures):.2f} s",
            f"{mean(each.ttft_p90 for each in measures):.2f} s",
            f"{mean(each.ttft_p99 for each in measures):.1f} s",
            f"{mean(run.met for run in of_side):.3f}",
            f"{mean(run.loaded for run in of_side):.1f} M",
        ]
