"""The cells of a run: a workload on a fleet at a load. Every router runs in each cell.

A load is a share of what the fleet could serve if it never computed a prefix twice. Saturation depends on the size of
the caches, so each workload and cache size has its own loads. A recorded trace is replayed at several speeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeVar

from benchmarks.policy.measures import Measures, measured
from benchmarks.policy.workloads import AGENT, CONVERSATION, Workload, ideal_seconds, sessions
from simulator.fleet.engine import LLAMA_8B, LLAMA_70B, Profile
from simulator.fleet.fleet import FleetSpec, Simulation
from simulator.fleet.simulated_router import Side
from simulator.fleet.trace import TracedRequest, TraceLine, read_trace, requests_of

T = TypeVar("T")

# The requests that decode together in a busy engine, and the context of each in tokens.
_BATCH, _CONTEXT = 24, 6000
_SAMPLE_SECONDS = 600.0
_TRACE_REQUESTS_A_WORKER = 900


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison.

    - `kv_tokens`: the cache of each worker.
    - `load`: a share of what the fleet could serve; of a recorded trace, requests a second and worker.
    - `seconds`: the length of a generated trace.
    """

    workload: Workload | Path
    profile: Profile
    workers: int
    kv_tokens: int
    load: float
    seconds: float = 300.0

    @property
    def name(self) -> str:
        load = f"load {self.load}" if isinstance(self.workload, Workload) else f"{self.load}/s a worker"
        return f"{self.workload_name}, {self.fleet_name}, {load}"

    @property
    def workload_name(self) -> str:
        return self.workload.name if isinstance(self.workload, Workload) else "trace"

    @property
    def fleet(self) -> FleetSpec:
        """The engines."""
        return FleetSpec(self.profile, self.workers, self.kv_tokens)

    @property
    def fleet_name(self) -> str:
        return f"{self.workers} of {self.profile.name}, {self.kv_tokens / 1e6:g} M tokens"

    def requests(self, seed: int) -> list[TracedRequest]:
        """Return the requests to replay."""
        if isinstance(self.workload, Path):
            lines = read_trace(self.workload, _TRACE_REQUESTS_A_WORKER * self.workers).lines
            seconds = (lines[-1].timestamp - lines[0].timestamp) / 1000
            return requests_of(lines, self.load * self.workers / (len(lines) / seconds))
        return requests_of(self.lines(seed))

    def lines(self, seed: int) -> list[TraceLine]:
        """Return a generated trace at this load."""
        assert isinstance(self.workload, Workload)
        sample = sessions(self.workload, 1.0, _SAMPLE_SECONDS, Random(0))
        work = ideal_seconds(sample, *_prices(self.profile))
        rate = self.load * self.workers / work / (len(sample) / _SAMPLE_SECONDS)
        return sessions(self.workload, rate, self.seconds, Random(seed))


def _prices(profile: Profile) -> tuple[float, float]:
    """Return the seconds of work for a prompt token, with some attention, and for a token of an answer."""
    rates = profile.rates
    return 1.1 * rates.token, rates.step / _BATCH + rates.token + rates.context_token * _CONTEXT


def play(cell: Cell, requests: Sequence[TracedRequest], side: Side, seed: int) -> Measures:
    """Replay the requests of a cell before one router, and return the figures."""
    return measured(Simulation(cell.fleet, side, Random(seed)).run(requests))


def play_all(
    cell: Cell,
    sides: Sequence[Side],
    seeds: int,
    play: Callable[[Cell, Sequence[TracedRequest], Side, int], T],
) -> dict[str, list[T]]:
    """Return the results of `play` for each router in one cell, seed by seed."""
    runs: dict[str, list[T]] = {side.name: [] for side in sides}
    for seed in range(seeds):
        requests = cell.requests(seed)
        for side in sides:
            runs[side.name].append(play(cell, requests, side, seed))
    return runs


def full_grid() -> Iterator[Cell]:
    """Yield two workloads on large and small caches up to saturation, then other engines and a larger fleet."""
    for workload, kv_tokens, loads in (
        (CONVERSATION, 1_200_000, (0.6, 1.2, 1.7)),
        (CONVERSATION, 300_000, (0.5, 0.8, 1.05)),
        (AGENT, 1_200_000, (0.4, 0.7, 0.9)),
        (AGENT, 300_000, (0.2, 0.3, 0.4)),
    ):
        yield from (Cell(workload, LLAMA_70B, 8, kv_tokens, load) for load in loads)
    yield from (Cell(CONVERSATION, LLAMA_8B, 8, 400_000, load) for load in (0.8, 1.05))
    yield Cell(CONVERSATION, LLAMA_70B, 32, 300_000, 1.1, seconds=200.0)
    yield Cell(AGENT, LLAMA_70B, 32, 300_000, 0.45, seconds=200.0)


def quick_grid() -> Iterator[Cell]:
    """Yield a cell at low load, and both workloads near saturation."""
    yield from (Cell(CONVERSATION, LLAMA_70B, 8, 300_000, load) for load in (0.5, 1.05))
    yield Cell(AGENT, LLAMA_70B, 8, 300_000, 0.4)


def trace_grid(trace: Path, quick: bool) -> Iterator[Cell]:
    """Yield a recorded trace on small and large caches."""
    for kv_tokens, rates in ((1_200_000, (0.8, 1.2, 1.35)), (4_000_000, (1.0, 1.5, 1.65))):
        yield from (Cell(trace, LLAMA_70B, 8, kv_tokens, rate) for rate in (rates[-1:] if quick else rates))
