"""Fleets of prefill and decode workers: this project's choice of a pair, and those of its peers.

A load is a share of saturation: the load at which one in ten answers misses the goals under the rule that this project
had before it chose pairs together. It is found once for each fleet and workload. Goodput is the share of answers within
both goals: 2 s to the first token, and 50 ms for each token after it. The first goal is extended by the prompt's own
prefill on an idle worker. The first 30% of each run do not count. Each table ends with the TTFT of an idle fleet that
evicts nothing, which bounds all rules.

The workers' network has three distances (`simulator.fleet.transfers`). NetKV reads the true rate of each pair. This
project learns it from answers.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from random import Random
from statistics import mean

import msgspec

from benchmarks.policy.light import LightRun, figures
from benchmarks.policy.measures import idle_ttfts, in_time
from benchmarks.policy.report import markdown
from benchmarks.policy.rivals.pairs import dynamo_pairs, fewest_requests, llm_d_pairs, mooncake_pairs, netkv_pairs
from benchmarks.policy.saturation import find_saturation
from benchmarks.policy.sessions import AGENTS, CHATS, SessionKind, generated, recorded
from indexer import Target
from kvrouter.tools.traces.results import percentile
from router.policies.pairs import PairRule
from router.policies.rates import prefill_seconds
from router.settings import PolicyName
from simulator.fleet.engine import LLAMA_70B
from simulator.fleet.fleet import FleetSpec, Outcome, Simulation
from simulator.fleet.simulated_router import OURS, Side
from simulator.fleet.sources import SourceSpec
from simulator.fleet.trace import BLOCK_TOKENS, RequestSLO, TracedRequest, TraceLine, read_trace, requests_of
from simulator.fleet.transfers import Network, NetworkSpec
from simulator.fleet.workers import worker_number

_TTFT_GOAL, _TPOT_GOAL, _MISSED = 2.0, 0.05, 0.1
_SHORT_ANSWER = 8  # tokens
_WARM_UP = 0.3
_KV_TOKENS = 1_280_000
_NETWORK = NetworkSpec()
_SOURCES = SourceSpec(pulls=True, link_rate=_NETWORK.end)  # only routers that name peers use them
_BEFORE = "fewest requests"  # this project's rule before it chose pairs together
_PAIRS: dict[str, Callable[[Random], PairRule]] = {
    _BEFORE: fewest_requests,
    "dynamo": lambda random: dynamo_pairs(random, conditional=False),
    "dynamo, conditional": dynamo_pairs,
    "llm_d": llm_d_pairs,
    "mooncake": mooncake_pairs,
}
_SINGLE = {"cache_aware": PolicyName.CACHE_AWARE, "round_robin": PolicyName.ROUND_ROBIN}
_NETKV = "netkv"
_WITH_SLOS, _PULLING = f"{OURS.name}, SLOs", f"{OURS.name}, pulls"
_OURS = {
    OURS.name: OURS,
    _WITH_SLOS: replace(OURS, name=_WITH_SLOS, slos=True),
    _PULLING: replace(OURS, name=_PULLING, sources=True),
}
_BOUND = "an idle fleet"
SIDES = (*_OURS, _BEFORE, *list(_PAIRS)[1:], _NETKV, *_SINGLE)


@dataclass(frozen=True, slots=True)
class Ground:
    """A workload on a fleet.

    - `workload`: a kind of sessions; or a recorded trace, of requests in Mooncake's format or of sessions.
    - `below`, `above`: two loads, between which saturation is: requests or sessions a second and worker.
    - `loads`: the loads that are compared, as shares of saturation.
    """

    workload: SessionKind | Path
    prefill: int
    decode: int
    below: float
    above: float
    seconds: float
    loads: tuple[float, ...] = (0.5, 0.85, 1.0, 1.1)

    @property
    def name(self) -> str:
        what = self.workload.name.split(".")[0].replace("_", " ")
        return f"{what}, {self.prefill}P{self.decode}D"

    @property
    def fleet(self) -> FleetSpec:
        """The engines."""
        workers = self.prefill + self.decode
        return FleetSpec(LLAMA_70B, workers, _KV_TOKENS, prefill=self.prefill, decode=self.decode, sources=_SOURCES)

    def requests(self, load: float, seed: int) -> list[TracedRequest]:
        """Return the requests at a load, with their goals as SLOs.

        Seeds are other windows of a trace of requests, and else other sessions.
        """
        return [with_goals(request) for request in self._requests(load, seed)]

    def _requests(self, load: float, seed: int) -> list[TracedRequest]:
        workers = self.prefill + self.decode
        if isinstance(self.workload, SessionKind):
            return generated(self.workload, load * workers, self.seconds, BLOCK_TOKENS, Random(seed))
        if holds_sessions(self.workload):
            return recorded(self.workload, load, workers, self.seconds, Random(seed))
        lines = list(without_ticks(read_trace(self.workload).lines, Random(seed)))
        count = min(int(load * workers * self.seconds), len(lines))
        start = (len(lines) - count) * (seed % 3) // 2
        window = lines[start : start + count]
        first, last = window[0].timestamp, window[-1].timestamp
        requests = requests_of(window, (last - first) / 1000 / (count / (load * workers)))
        begin = requests[0].arrival
        return [replace(request, arrival=request.arrival - begin) for request in requests]

    def saturation(self) -> float:
        """Return the load at which one in ten answers misses the goals under the rule before."""
        return find_saturation(lambda load: play(self, load, _BEFORE, 0).goodput >= 1 - _MISSED, self.below, self.above)


@dataclass(frozen=True, slots=True)
class PairRun:
    """The figures of a run.

    - `goodput`: the share of answers within both goals.
    - `remote`: the share of prompts that another worker computed.
    - `moved`: the mean tokens that a decode worker fetched for one of these.
    - `bound`: TTFT p50, p90 and p99 of these requests on an idle fleet that evicts nothing.
    """

    times: LightRun
    goodput: float
    remote: float
    moved: float
    bound: tuple[float, float, float]


def holds_sessions(trace: Path) -> bool:
    """Return whether a trace has sessions, whose turns have a `delay` instead of a `timestamp`."""
    with gzip.open(trace, "rb") as file:
        return any(b'"timestamp"' not in file.readline() for _ in range(2))


def without_ticks(lines: Sequence[TraceLine], random: Random) -> Iterator[TraceLine]:
    """Yield the requests of a trace with random times within the ticks of its clock, in order.

    Mooncake's traces have ticks of 3 s. About ten requests that arrive at once would wait at any load.
    """
    ticks = [list(group) for _, group in groupby(lines, key=lambda line: line.timestamp)]
    begins = [tick[0].timestamp for tick in ticks]
    ends = [*begins[1:], 2 * begins[-1] - begins[-2]]
    for tick, begin, end in zip(ticks, begins, ends, strict=True):
        times = sorted(random.uniform(begin, end) for _ in tick)
        for line, timestamp in zip(tick, times, strict=True):
            yield msgspec.structs.replace(line, timestamp=timestamp)


def with_goals(request: TracedRequest) -> TracedRequest:
    """Return a request with its goals, and those that follow it with theirs. Short answers have no goal of TPOT."""
    turns, following = [request], None
    while (after := turns[-1].following) is not None:
        turns.append(after)
    for each in reversed(turns):
        own = prefill_seconds(LLAMA_70B.rates, each.input_tokens, 0, 0, 0)
        slo = RequestSLO("goals", _TTFT_GOAL + own, _TPOT_GOAL if each.output_tokens > _SHORT_ANSWER else None)
        following = replace(each, slo=slo, following=following)
    assert following is not None
    return following


def side_named(name: str, ground: Ground) -> Side:
    """Return a router by its name in tables."""
    if name in _OURS:
        return _OURS[name]
    if name in _SINGLE:
        return Side(name, _SINGLE[name])
    if name == _NETKV:
        network = Network(ground.fleet.network, ground.fleet.roles)

        def seconds(prefill: Target, decode: Target, tokens: float) -> float:
            return ground.fleet.network.latency + tokens / network.rate(worker_number(prefill), worker_number(decode))

        return Side(name, PolicyName.KV_AWARE, pairs=lambda random: netkv_pairs(random, seconds))
    return Side(name, PolicyName.KV_AWARE, pairs=_PAIRS[name])


def grounds(trace: Path | None, quick: bool) -> Iterator[Ground]:
    """Yield the fleets for a trace; without one, those for generated agents and chats."""
    fleets = ((4, 4), (2, 6)) if quick else ((4, 4), (8, 8), (2, 6), (6, 2))
    loads = (0.85, 1.0) if quick else (0.5, 0.85, 1.0, 1.1)
    for prefill, decode in fleets:
        if trace is None:
            yield Ground(AGENTS, prefill, decode, 0.01, 0.2, 250.0, loads)
            yield Ground(CHATS, prefill, decode, 0.1, 1.5, 200.0, loads)
        elif holds_sessions(trace):
            yield Ground(trace, prefill, decode, 0.05, 1.2, 400.0, loads)
        else:
            yield Ground(trace, prefill, decode, 0.05, 1.0, 250.0, loads)
    if trace is not None and not quick and holds_sessions(trace):
        yield Ground(trace, 16, 48, 0.05, 1.2, 400.0, (0.85, 1.0))


def play(ground: Ground, load: float, side: str, seed: int) -> PairRun:
    """Replay the requests of a ground at a load before one router."""
    simulation = Simulation(ground.fleet, side_named(side, ground), Random(seed))
    return measured(simulation.run(ground.requests(load, seed), until=ground.seconds))


def measured(outcomes: Sequence[Outcome]) -> PairRun:
    """Return the figures of a run after its warm-up."""
    first = outcomes[-1].request.arrival * _WARM_UP
    steady = [each for each in outcomes if each.request.arrival >= first]
    remote = [each for each in steady if each.prefill >= 0]
    idle = list(idle_ttfts(each.request for each in outcomes))[-len(steady) :]
    return PairRun(
        figures(outcomes),
        sum(_is_good(each) for each in steady) / len(steady),
        len(remote) / len(steady),
        sum(each.moved for each in remote) / max(len(remote), 1),
        (percentile(idle, 0.5), percentile(idle, 0.9), percentile(idle, 0.99)),
    )


def _is_good(outcome: Outcome) -> bool:
    slo = outcome.request.slo
    return slo is not None and in_time(outcome, slo.ttft, slo.tpot)


def compare_pairs(trace: Path | None, quick: bool, seeds: int, show: Callable[[str], None]) -> str:
    """Run all cells on all cores, and show the table of each when it is done. Return the tables: means over seeds."""
    tables = []
    with ProcessPoolExecutor() as cores:
        all_grounds = list(grounds(trace, quick))
        saturations = {ground: cores.submit(ground.saturation) for ground in all_grounds}
        for ground, found in saturations.items():
            saturation = found.result()
            for share in ground.loads:
                tables.append(markdown(_table(ground, share, saturation, seeds, cores)))
                show(f"{tables[-1]}\n")
    return "\n\n".join(tables)


def _table(ground: Ground, share: float, saturation: float, seeds: int, cores: Executor) -> list[list[str]]:
    head = f"{ground.name}, {share:g} of {saturation:.3g}/s a worker"
    rows = [[head, "TTFT p50", "p90", "p99", "TPOT p90", "answer p90", "goodput", "spread", "remote", "moved"]]
    runs: dict[str, list[Future[PairRun]]] = {
        side: [cores.submit(play, ground, share * saturation, side, seed) for seed in range(seeds)] for side in SIDES
    }
    for name, futures in runs.items():
        rows.append([name, *_row([future.result() for future in futures])])
    bounds = [future.result().bound for future in runs[OURS.name]]
    rows.append([_BOUND, *(f"{mean(bound[place] for bound in bounds):.2f} s" for place in range(3)), *[""] * 6])
    return rows


def _row(runs: Sequence[PairRun]) -> list[str]:
    goodput = [run.goodput for run in runs]
    return [
        *(f"{mean(run.times.ttft[place] for run in runs):.2f} s" for place in range(3)),
        f"{1000 * mean(run.times.tpot[1] for run in runs):.0f} ms",
        f"{mean(run.times.answer_p90 for run in runs):.1f} s",
        f"{mean(goodput):.3f}",
        f"{min(goodput):.3f}-{max(goodput):.3f}",
        f"{mean(run.remote for run in runs):.2f}",
        f"{mean(run.moved for run in runs):.0f}",
    ]
